"""Host memory that is lent: no byte of it twice at once, and within reach of devices for as long as it is kept."""

from __future__ import annotations

import random
import threading

from forebay.client.registered import address_of, find
from forebay.connectors.vllm.host_memory import HostMemory, Space, room

STEP = room(1)


def address(space: Space) -> int:
    return address_of(memoryview(space.memory))


def test_spaces_are_apart_and_come_from_as_far_ahead_as_there_is_room() -> None:
    memory = HostMemory(4 * STEP)
    first, second, third = (memory.take(size) for size in (STEP, STEP + 1, 1))
    assert first is not None and second is not None and third is not None
    assert [(space.start, space.end) for space in (first, second, third)] == [
        (0, STEP),
        (STEP, 3 * STEP),
        (3 * STEP, 4 * STEP),
    ]
    assert memory.take(1) is None and memory.lent_bytes == 4 * STEP
    memory.give(second)
    assert memory.take(2 * STEP + 1) is None
    again = memory.take(STEP)
    assert again is not None and again.start == STEP
    memory.close()


def test_any_order_of_takers_and_givers(seed: int = 7) -> None:
    rng, memory = random.Random(seed), HostMemory(64 * STEP)
    held: list[tuple[Space, int]] = []
    refused = 0
    for number in range(2_000):
        if held and rng.random() < 0.5:
            space, mark = held.pop(rng.randrange(len(held)))
            assert (space.memory == mark).all(), "somebody else wrote to it"
            memory.give(space)
        elif (taken := memory.take(rng.randrange(1, 12 * STEP))) is not None:
            taken.memory[:] = number % 251
            held.append((taken, number % 251))
        else:
            refused += 1
    assert refused and memory.lent_bytes == sum(space.end - space.start for space, _ in held)
    memory.close()


def test_threads_that_take_one_each_at_a_time_all_have_room() -> None:
    threads, memory = 6, HostMemory(6 * STEP)
    together, wrong = threading.Barrier(threads), threading.Event()

    def work(mark: int) -> None:
        together.wait(60)
        for _ in range(200):
            with memory.lent(STEP - mark) as space:
                space.memory[:] = mark
                if not (space.memory == mark).all():
                    wrong.set()

    workers = [threading.Thread(target=work, args=(mark,)) for mark in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong.is_set() and not memory.lent_bytes
    memory.close()


def test_it_is_registered_until_it_is_closed() -> None:
    memory = HostMemory(4 * STEP)
    space = memory.take(3 * STEP)
    assert space is not None
    rows = space.rows(5, 1_000, first=STEP)
    start = address(space)
    assert address_of(memoryview(rows[0])) == start + STEP
    assert find(start, 4 * STEP) is not None and find(start, 4 * STEP + 1) is None
    memory.close()
    assert find(start, 1) is None
