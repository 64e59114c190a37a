# Runs in the guest: Linux's initiator, and nvme-cli, at targets of the other side. test_kernel.py reads what it prints.
. /share/guest.sh
. /share/settings # RAW FENCED CLOSED SECURE PORT HOSTNQN HOSTID SECRET CONTROLLER_SECRET, a port a target of `replayed`
modprobe -a nvme-tcp
T="-t tcp -a 10.0.2.2 -s $PORT"
ME="-q $HOSTNQN -I $HOSTID"
disks() { # there are so many
  local disk found=0
  for disk in /dev/nvme0n*; do [ -b "$disk" ] && found=$((found + 1)); done
  [ $found = "$1" ]
}
detach() { nvme disconnect-all; until_ gone /dev/nvme0; }
attach() { detach; nvme connect $T -n "$1" $ME "${@:2}"; until_ test -b /dev/nvme0n1; }
verify() { # verify NAME fio options...
  fio --name="$1" --filename=/dev/nvme0n1 --ioengine=io_uring --direct=1 --verify=crc32c --do_verify=1 \
    --verify_fatal=1 --randrepeat=0 "${@:2}" --output-format=terse | cut -d';' -f 1-5
  return "${PIPESTATUS[0]}"
}
zero() { dd if=/dev/nvme0n1 bs=64k skip="$1" count="$2" iflag=direct 2>/dev/null | cmp -n $(($2 * 65536)) - /dev/zero; }
discover() { nvme discover $T $ME; }

several_queues() {
  attach "$RAW" -i 2
  grep -x 3 /sys/class/nvme/nvme0/queue_count
  cat /sys/class/nvme/nvme0/kato /sys/block/nvme0n1/queue/{max_hw_sectors_kb,fua,write_cache}
}

fio_verify() {
  verify small --size=2M --rw=randwrite --bs=4k --iodepth=1
  verify mixed --size=12M --rw=randwrite --bsrange=4k-1M --iodepth=16
  verify both --offset=32M --size=8M --rw=randrw --bsrange=4k-128k --iodepth=32
}

flush() {
  dd if=/dev/urandom of=/dev/nvme0n1 bs=64k count=16 oflag=direct conv=fsync
  dd if=/dev/urandom of=/dev/nvme0n1 bs=4k count=4 oflag=direct,dsync
  nvme flush /dev/nvme0n1 -n 1
}

deallocate() {
  tr '\0' k < /dev/zero | dd of=/dev/nvme0n1 bs=64k count=64 iflag=fullblock oflag=direct
  blkdiscard -o $((16 * 65536)) -l $((8 * 65536)) /dev/nvme0n1
  zero 16 8
  blkdiscard -z -o $((32 * 65536)) -l $((8 * 65536)) /dev/nvme0n1
  zero 32 8
  nvme write-zeroes /dev/nvme0n1 -s $((48 * 16)) -c 15
  zero 48 1
  nvme dsm /dev/nvme0n1 -d -s $((50 * 16)) -b 16
  zero 50 1
  for at in 15 24 31 40 49 51; do
    [ "$(dd if=/dev/nvme0n1 bs=64k skip=$at count=1 iflag=direct 2>/dev/null | tr -d k | wc -c)" = 0 ]
  done
}

prints() {
  nvme list; nvme id-ctrl /dev/nvme0 -H; nvme id-ns /dev/nvme0n1 -H; nvme smart-log /dev/nvme0; nvme error-log /dev/nvme0 -e 4
  nvme fw-log /dev/nvme0; nvme list-ns /dev/nvme0; nvme ns-descs /dev/nvme0 -n 1; nvme get-log /dev/nvme0 -i 2 -l 512
  nvme supported-log-pages /dev/nvme0; nvme list-subsys
  for feature in 1 2 4 5 6 7 0xa 0xb 0xf; do nvme get-feature /dev/nvme0 -f $feature -H; done
}

namespaces_come_and_go() {
  ask add; until_ disks 2
  dd if=/dev/nvme0n2 of=/dev/null bs=64k count=4 iflag=direct
  ask remove; until_ disks 1
  ask show; until_ disks 2
  nvme list-ns /dev/nvme0 | grep 0x3
  ask hide; until_ disks 1
  test -b /dev/nvme0n1
}

digests() {
  attach "$RAW" -i 2 -g -G
  verify digested --size=8M --rw=randwrite --bsrange=4k-512k --iodepth=16
  nvme flush /dev/nvme0n1 -n 1
  detach
}

fenced() {
  attach "$FENCED"
  dd if=/dev/urandom of=/tmp/granted bs=64k count=4 2>/dev/null
  dd if=/tmp/granted of=/dev/nvme0n1 bs=64k oflag=direct # LBAs 0 to 63 are granted
  dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct | cmp - /tmp/granted
  ! dd if=/tmp/granted of=/dev/nvme0n1 bs=96k seek=2 count=1 oflag=direct # LBAs 48 to 71: a part of it is not
  ! dd if=/tmp/granted of=/dev/nvme0n1 bs=4k seek=4096 count=1 oflag=direct
  zero 4 8
  ! nvme write-zeroes /dev/nvme0n1 -s 0 -c 0
  ! nvme dsm /dev/nvme0n1 -d -s 0 -b 1
  dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct | cmp - /tmp/granted
  detach
}

wrong_host() { ! nvme connect $T -n "$CLOSED" $ME; }

authenticated() { # both ways, by each hash and group that the other side may want
  local queues=2
  for agreed in $AGREED; do
    ask "agree_$agreed"
    attach "$SECURE" -i $queues -S "$SECRET" -C "$CONTROLLER_SECRET"
    dd if=/dev/urandom of=/tmp/proven bs=64k count=4 2>/dev/null
    dd if=/tmp/proven of=/dev/nvme0n1 bs=64k oflag=direct
    dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct | cmp - /tmp/proven
    queues=1
  done
  ask agree_0
  attach "$SECURE" -i 1 -S "$SECRET" # the host alone
  dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct | cmp - /tmp/proven
}

authenticated_again() { # while connected, when its secret is set
  local secret=/sys/class/nvme/nvme0/dhchap_secret
  grep -qxF "$SECRET" $secret
  dmesg -c > /dev/null
  echo "$SECRET" > $secret
  dd if=/dev/nvme0n1 bs=64k count=4 iflag=direct | cmp - /tmp/proven
  detach
}

not_authenticated() {
  local wrong=$(nvme gen-dhchap-key -m 1 -n "$HOSTNQN")
  ! nvme connect $T -n "$SECURE" $ME
  ! nvme connect $T -n "$SECURE" $ME -S "$wrong"
  ! nvme connect $T -n "$SECURE" $ME -S "$SECRET" -C "$wrong"
}

restart() {
  attach "$RAW" -i 2 -c 1 -l 120 -k 5
  verify restarted --size=18M --rw=randwrite --bsrange=4k-256k --iodepth=8 --rate=6m > /tmp/fio.out 2>&1 & job=$!
  sleep 1.5
  ask restart
  wait $job || { cat /tmp/fio.out; return 1; }
  cat /tmp/fio.out
  detach
}

keep_alive() {
  attach "$RAW" -i 2 -c 1 -l 120 -k 2
  ip link set eth0 down # the host falls silent
  ask expired
  ip link set eth0 up
  until_ grep -qx live /sys/class/nvme/nvme0/state
  until_ dd if=/dev/nvme0n1 of=/dev/null bs=64k count=4 iflag=direct
  detach
}

replayed() { # replayed TARGET PORT: the connection breaks with a write on its way; before the next one the block is another's
  detach
  nvme connect -t tcp -a 10.0.2.2 -s "$2" -n "$FENCED" $ME -i 1 -c 1 -l 120 -k 60
  until_ test -b /dev/nvme0n1
  dd if=/dev/nvme0n1 of=/dev/null bs=4k count=1 iflag=direct # the kernel's own reads, for partitions, are over then
  tr '\0' s < /dev/zero | head -c 4096 > /tmp/stale
  ask "hold_$1"
  dd if=/tmp/stale of=/dev/nvme0n1 bs=4k seek=8 count=1 oflag=direct & job=$!
  ask "give_$1"
  if wait $job; then echo written; else echo refused; fi
  dd if=/dev/nvme0n1 bs=4k skip=8 count=1 iflag=direct 2> /dev/null | tr -s a-z; echo
  detach
}

replayed_product() { replayed product "$PRODUCT"; }

replayed_undefended() { replayed undefended "$UNDEFENDED"; }

dmesg -c > /dev/null
for name in discover several_queues fio_verify flush deallocate prints namespaces_come_and_go digests fenced wrong_host \
  authenticated authenticated_again not_authenticated restart keep_alive replayed_product replayed_undefended; do
  check $name
done
