# For scripts that run in the guest: `. /share/guest.sh`. `check NAME` runs the function NAME and prints what it did, its
# exit status and the kernel's messages since the last one; checks.py reads that.
ask() { # ask WORD: have the other side do something, and wait until it is done
  : > "/share/asking"; mv /share/asking "/share/ask.$1" # all at once: the other side removes it when it sees it
  for _ in $(seq 300); do [ -e "/share/done.$1" ] && { rm "/share/done.$1"; return 0; }; sleep 0.1; done
  echo "nobody did $1"; return 1
}
until_() { # until_ CONDITION...: within 30 s
  for _ in $(seq 300); do "$@" && return 0; sleep 0.1; done
  echo "never: $*"; return 1
}
gone() { ! [ -e "$1" ]; }
null() { # null NAME MIB DELAY_NS: a disk in memory, /dev/NAME, which answers after that delay; needs null_blk and configfs
  local d=/sys/kernel/config/nullb/$1; mkdir "$d"
  echo 4096 > "$d/blocksize"; echo "$2" > "$d/size"; echo 1 > "$d/memory_backed"; echo 2 > "$d/queue_mode"
  [ "$3" = 0 ] || { echo 2 > "$d/irqmode"; echo "$3" > "$d/completion_nsec"; }
  echo 1 > "$d/power"
}
check() {
  local began=$SECONDS
  echo "=== check $1"
  ( set -e; "$1" ) < /dev/null
  echo "=== status $?"
  dmesg -c 2>/dev/null
  echo "=== end"
  echo "$1 took $((SECONDS - began)) s"
}
