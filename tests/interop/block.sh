# Runs in the guest: the volumes of a node that runs outside, attached by Linux, and a client that reads them by that device
# (block_client.py). test_block.py reads what comes of it.
. /share/guest.sh
. /share/settings # SUBSYSTEM PORT HOSTNQN HOSTID, and for the client URL TOKEN

modprobe -a nvme-tcp
export SUBSYSTEM PORT HOSTNQN HOSTID URL TOKEN
export PYTHONPATH=/mnt/repo/src:/mnt/repo:/mnt/site PYTHONDONTWRITEBYTECODE=1

attach() { # a lost path is tried again each second, and for long
  nvme connect -t tcp -a 10.0.2.2 -s "$PORT" -n "$SUBSYSTEM" -q "$HOSTNQN" -I "$HOSTID" -i 2 -c 1 -l 600 -k 5
  until_ test -b /dev/nvme0n1
}
only_read() { # the kernel is told why
  ! dd if=/dev/zero of=/dev/nvme0n1 bs=4k seek=20000 count=1 oflag=direct
}
client() { timeout 400 python3 -X faulthandler /mnt/repo/tests/interop/block_client.py; }

dmesg -c > /dev/null
for name in attach only_read client; do check $name; done
