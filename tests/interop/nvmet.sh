# Runs in the guest: the kernel's NVMe/TCP target, until the other side has it end. test_nvmet.py is its host.
. /share/guest.sh
. /share/settings # NQN SECURE PORT; HOSTS: name,secret,secret of the target,hash,group of each that has to prove itself

C=/sys/kernel/config
T=$C/nvmet
subsystem() { # subsystem NQN DISK...
  local s=$T/subsystems/$1 n=0 disk
  mkdir "$s"
  for disk in "${@:2}"; do
    n=$((n + 1)); mkdir "$s/namespaces/$n"
    echo -n "/dev/$disk" > "$s/namespaces/$n/device_path"; echo 1 > "$s/namespaces/$n/enable"
  done
}

serve() {
  modprobe -a nvmet nvmet-tcp
  modprobe null_blk nr_devices=0
  mountpoint -q $C || mount -t configfs none $C
  null fast 64 0; null slow 4 700000000; null locked 32 0
  subsystem "$NQN" fast slow
  echo 1 > "$T/subsystems/$NQN/attr_allow_any_host"
  subsystem "$SECURE" locked
  local host name secret controller hash group
  for host in $HOSTS; do
    IFS=, read -r name secret controller hash group <<< "$host"
    mkdir "$T/hosts/$name"
    echo -n "$secret" > "$T/hosts/$name/dhchap_key"
    [ -z "$controller" ] || echo -n "$controller" > "$T/hosts/$name/dhchap_ctrl_key"
    echo "hmac($hash)" > "$T/hosts/$name/dhchap_hash"; echo "$group" > "$T/hosts/$name/dhchap_dhgroup"
    ln -s "$T/hosts/$name" "$T/subsystems/$SECURE/allowed_hosts/"
  done
  local p=$T/ports/1; mkdir "$p"
  echo ipv4 > "$p/addr_adrfam"; echo tcp > "$p/addr_trtype"; echo 0.0.0.0 > "$p/addr_traddr"; echo "$PORT" > "$p/addr_trsvcid"
  ln -s "$T/subsystems/$NQN" "$T/subsystems/$SECURE" "$p/subsystems/"
}

stays() { # until it is told to end; meanwhile the target may have to go, and to come back
  ask ready
  until [ -e /share/over ]; do
    if [ -e /share/leave ]; then
      rm "$T/ports/1/subsystems/$NQN"; rm /share/leave
      until_ test -e /share/return
      ln -s "$T/subsystems/$NQN" "$T/ports/1/subsystems/"; rm /share/return
    fi
    sleep 0.1
  done
}

dmesg -c > /dev/null
check serve
check stays
