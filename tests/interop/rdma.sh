# Runs in a guest: Soft-RoCE, the kernel's NVMe/RDMA target on that, and a suite of tests as its host; all of it in one, or
# host and target in one each, with a wire between them. test_rdma.py and test_rdma_wire.py read what comes of it.
. /share/guest.sh
. /share/settings # CHECKS to make; NQN ADDRESS PORT of the target; NETDEV, and on a wire MINE; SUITE and KEYWORDS of its tests

C=/sys/kernel/config
device() {
  modprobe -a crc32_generic crc32-pclmul rdma_rxe ib_uverbs rdma_ucm
  if [ "$NETDEV" != eth0 ]; then ip addr add "$MINE/24" dev "$NETDEV"; ip link set "$NETDEV" up; fi
  rdma link add rxe0 type rxe netdev "$NETDEV"
}

target() {
  modprobe -a nvmet nvmet-rdma
  modprobe null_blk nr_devices=0
  mountpoint -q $C || mount -t configfs none $C
  null fast 64 0
  null slow 4 700000000
  local s=$C/nvmet/subsystems/$NQN p=$C/nvmet/ports/1 n=0 disk
  mkdir "$s"; echo 1 > "$s/attr_allow_any_host"
  for disk in fast slow; do
    n=$((n + 1)); mkdir "$s/namespaces/$n"
    echo -n "/dev/$disk" > "$s/namespaces/$n/device_path"; echo 1 > "$s/namespaces/$n/enable"
  done
  mkdir "$p"; echo ipv4 > "$p/addr_adrfam"; echo rdma > "$p/addr_trtype"
  echo "$ADDRESS" > "$p/addr_traddr"; echo "$PORT" > "$p/addr_trsvcid"; ln -s "$s" "$p/subsystems/"
}

suite() {
  # The client's package imports gRPC and all else of it, for half a minute here: only some of its modules are wanted.
  mkdir /tmp/python
  cat > /tmp/python/sitecustomize.py <<'P'
import sys, types
package = sys.modules["forebay.client"] = types.ModuleType("forebay.client")
package.__path__ = ["/mnt/repo/src/forebay/client"]
P
  cd /tmp
  export PYTHONPATH=/tmp/python:/mnt/repo/src:/mnt/repo:/mnt/site PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
  export NQN ADDRESS PORT
  timeout 440 python3 -X faulthandler -m pytest --noconftest -c /dev/null --rootdir /mnt/repo --import-mode=importlib \
    -p no:cacheprovider -o faulthandler_timeout=60 -o junit_family=xunit2 --junitxml=/share/results.xml \
    --durations=8 -q -k "$KEYWORDS" "/mnt/repo/tests/interop/$SUITE"
}

stays() { # until it is told to end
  ask ready
  until [ -e /share/over ]; do sleep 0.1; done
}

dmesg -c > /dev/null
for name in $CHECKS; do check $name; done
