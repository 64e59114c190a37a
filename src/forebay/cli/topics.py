"""Pages on concepts, for `forebay help TOPIC`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.cli.exits import MEANINGS

__all__ = ["MISSES", "TOPICS", "Topic"]


@dataclass(frozen=True, slots=True)
class Topic:
    """A page: a title of one line, and what makes its text."""

    title: str
    text: Callable[[], str]


_KEYS = """\
A key is 1 to 1,024 bytes that the client chooses. Forebay never parses it and never puts a rank, TP or PP number
into it. Engines use the variant of a prompt (LoRA contents, cache salt) followed by their own chained hash of the
token block; people use any text.

Beside the key every call carries what makes two blocks interchangeable, and blocks that differ in any of it never
meet:

  namespace    tenant/name, with rights, quota and policy            --namespace
  keyspace     the digest of the schema: model, hash, layout, dtype  of the session; `forebay put` uses `opaque`
  generation   a number for the weights of this moment               --generation
  scope        the end tenant that an engine acts for                of the session
  group        the KV group of a model (full, sliding, mamba, ...)   of the call

So `forebay ls`, `match` and `stat` see what `forebay put` stored; with --keyspace, of which `forebay keyspaces` lists
those in use, they see the blocks of engines. `forebay why` says what keeps a key from being found.

On the command line a key is text, or bytes with --hex. One that is no printable text, or begins with 0x, is shown
as 0x..., which --hex takes.
A value has 1 byte to 64 MiB and never changes: putting a stored key again writes nothing and says so.

If two replicas of one engine never hit each other's blocks, their keys or schemas differ: a seeded hash is the
usual cause. `forebay doctor --schema FILE` looks for it.
"""

_NAMESPACES = """\
A namespace (tenant/name) is a set of blocks with rights, a quota and a policy of its own. Blocks of two namespaces
never meet, and neither can see or time the other's.

  quota            bytes it may hold at most; 0: only the node's capacity         --quota 200GiB
  durability       what "stored" means: forebay help durability                   --durability flush
  eviction         lru: old blocks make room. none: a full namespace refuses      --eviction lru
  retention        keep blocks at least this long where room allows               --retention 10m
  ttl              blocks are not found any more this long after being stored     --ttl 1h
  min-generation   blocks of older weights are no longer served, at once          --min-generation 7

Pinned blocks, blocks being read and blocks being written are never evicted; `forebay rm` removes a pinned one.
Capacity and quotas are hard limits: where nothing may be evicted, a write is refused (no_space, quota_exceeded) and
nothing else suffers.

On a full node a namespace makes room among its own blocks. One that has less than an even share of the node's space
takes it from the namespace that holds most, as long as that holds more than its share. A namespace with eviction
none gives nothing up: bound it by a quota.

Scopes are the end tenants of one engine inside a namespace. Each can have a bound of its own
(`forebay namespace scope-quota`), and `forebay namespace show` lists what each uses.

Space moves between namespaces in regions of 64 MiB or more, zeroed before another namespace gets them; so
`reserved` of a namespace is more than what its blocks use.
"""

_DURABILITY = """\
A block that was acknowledged is durable as its namespace's policy says. It is chosen with --durability when the
namespace is created or changed, and holds for blocks stored from then on.

  flush      Bytes are on stable media before the node says "stored". Survives power loss. The default.
  verify     Faster: the node answers before the drive has flushed. After an unclean stop every block whose flush is
             not known is verified by its checksums before it is served; what did not reach the drive is a miss.
  volatile   For handing a prefix from one engine to another: it may vanish at any stop of the node.

Whatever the policy: bytes are checked against checksums bound to key, tile and write before they are used, so a
block that did not survive is a miss and never wrong bytes; and a block is visible whole or not at all.

`forebay stat KEY` shows the policy that a block was stored under. A drive whose cache lies about flushing defeats
`flush` as it defeats every database.
"""

MISSES: dict[str, tuple[str, str]] = {
    "absent": (
        "no visible block has this key: never stored, expired by ttl, removed, or of another namespace, keyspace, "
        "generation or scope",
        "normal for a new prefix; if it should be there: `forebay ls`, `forebay events`, `forebay help keys`",
    ),
    "evicted": (
        "it was stored, and made room for other blocks since",
        "the namespace holds less than is in use: raise its quota or the node's capacity (`forebay top` shows)",
    ),
    "other_keyspace": (
        "the namespace has this key, stored by an engine with another model, layout or settings",
        "`forebay why` shows what differs; make it alike in all engines that shall share",
    ),
    "other_generation": (
        "the namespace has this key in the same keyspace under another generation",
        "engines with the same weights need the same generation; after new weights this is as it should be",
    ),
    "pending": (
        "another writer is storing it right now",
        "the client's wait() tells when it is visible; a dead writer's claim ends with its session",
    ),
    "checksum_mismatch": (
        "the bytes are not those that were stored; the node verifies the block, and drops it if it is bad",
        "one: bit rot. Many: replace the drive (`forebay status`, the node's log)",
    ),
    "lease_expired": (
        "the bytes came after the lease had run out, so they may be another block's and were not used",
        "loads are slower than sessions.lease_ttl: raise it, or look for an overloaded node or network",
    ),
    "stale_generation": (
        "the session's generation, or the only one that has this key, is below the namespace's minimum",
        "restart the engine with the weights in use; `forebay namespace show` names the minimum",
    ),
    "session_expired": (
        "the node has not heard of this session for sessions.expiry; the client opens a new one by itself",
        "often: the client's process was stopped or starved",
    ),
    "stale_incarnation": (
        "the node restarted; the client opens a new session by itself",
        "why it restarted is in its log; stored blocks are there again at once",
    ),
    "unavailable": (
        "the node or its target does not answer",
        "`forebay doctor` and `forebay status`; a firewall between client and target is the usual cause",
    ),
    "connection_lost": (
        "the connection to the target broke during the read",
        "once: a restart. Again and again: the network, or target.max_connections",
    ),
    "deadline_exceeded": (
        "the answer was not there by the call's deadline",
        "`forebay top` and `forebay bench` show whether the node is slow or only busy",
    ),
    "busy": ("the node is at a limit and said when to ask again", "more nodes, fewer connections, or higher limits"),
    "permission_denied": ("the principal has not the right for this", "`forebay principal grant`"),
    "unauthenticated": ("the token is not known (any more)", "`forebay principal rotate`, and restart with the token"),
    "namespace_not_found": (
        "the namespace was deleted, or the principal may not know of it",
        "`forebay namespace ls`, `forebay principal ls`",
    ),
    "not_found": ("something that the call names does not exist", "the message of the node's log says what"),
    "no_space": (
        "a write found no room that may be freed: what the namespace holds is pinned, leased or being written, and no "
        "other namespace has more than its even share, or may be evicted",
        "unpin, remove, or give the node more capacity; `forebay namespace ls` shows who holds how much, and a quota "
        "bounds a namespace with eviction none",
    ),
    "quota_exceeded": (
        "a write would pass the quota of its namespace or scope, and nothing there may be evicted",
        "`forebay namespace set NAME --quota`, `forebay namespace scope-quota`",
    ),
    "already_exists": ("a put found the key stored: the result says present", "nothing to do: a block never changes"),
    "write_expired": (
        "the write took longer than sessions.write_ttl, or was taken back",
        "slow network or drive: raise it; the block can be stored again",
    ),
    "write_fenced": (
        "the target refused a write outside a live grant",
        "follows write_expired and restarts; alone it is a bug worth reporting",
    ),
    "target_refused": ("the target refused the connection or the command", "the target's log says why"),
    "target_failed": ("the target reported a media or internal error", "`dmesg`, `forebay status`: the drive"),
    "value_size": (
        "the buffer or value is not of the size that the block or the schema has",
        "for a read of opaque blocks: give a buffer at least as long as the value",
    ),
    "protocol_error": (
        "an answer was malformed",
        "client and node of different versions? `forebay doctor` compares them",
    ),
}
"""Reason of a miss (or of a refused write): what it means, what to do."""


def _misses() -> str:
    lines = [
        "Whatever goes wrong, a read returns by its deadline with a miss and a reason, and the engine computes.",
        "Reasons stand in results, in `--json`, in the client's counters (`client.stats.misses`) and in the node's",
        "metrics (forebay_lookup_keys_total). The same words say why a put stored nothing.",
        "",
    ]
    for reason, (meaning, advice) in MISSES.items():
        lines += [f"  {reason}", *_folded(meaning), *_folded(f"-> {advice}"), ""]
    return "\n".join(lines)


def _folded(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")


_EXITS_HEAD = """\
A batch exits with the most serious code of its keys. Errors are one line on standard error: what happened, the field
and its limit, the error's stable name and number, and what to do. `forebay --debug ...` shows the traceback instead.

"""

TOPICS: dict[str, Topic] = {
    "keys": Topic("what names a block, and when two blocks are the same", lambda: _KEYS),
    "namespaces": Topic("quota, policy, scopes: what an operator sets", lambda: _NAMESPACES),
    "durability": Topic("what is promised when a block is stored", lambda: _DURABILITY),
    "misses": Topic("why a block was not loaded or stored, and what to do", _misses),
    "exit-codes": Topic(
        "what a script can rely on",
        lambda: _EXITS_HEAD + "\n".join(f"  {code:<4} {text}" for code, text in MEANINGS.items()),
    ),
}
"""By the word that asks for them."""
