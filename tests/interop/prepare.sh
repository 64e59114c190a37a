#!/bin/bash
# prepare.sh WORKDIR - builds, from Debian packages alone, a small guest whose kernel has what most build machines' have
# not: NVMe/TCP and NVMe/RDMA initiators and targets, and Soft-RoCE. Leaves WORKDIR/{vmlinuz,initrd.gz,root.img}. Needs
# root and a Debian machine, whose own mirrors it reads; apt's state on the machine stays as it is, but for the packages
# that run the guest.
set -euo pipefail
W=$1; mkdir -p "$W"; W=$(cd "$W"; pwd); cd "$W"
SOURCES=/etc/apt/sources.list.d/debian.sources
step() { echo "[$(printf %4d $SECONDS)s] $*"; }
step "packages that run the guest"
need=()
for package in qemu-system-x86 cpio busybox-static e2fsprogs kmod xz-utils; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || need+=("$package")
done
if [ ${#need[@]} -gt 0 ]; then
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends "${need[@]}"
fi
# A private apt state.
mkdir -p apt/{lists/partial,cache/archives/partial,parts}; : > apt/status
uris() { awk '/^URIs:/{print $2}' "$SOURCES" | sort -u; }
MAIN=$(uris | grep -v security | head -1); SECURITY=$(uris | grep security | head -1 || true)
SIGNED='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
{ echo "deb $SIGNED $MAIN bookworm main"; echo "deb $SIGNED $MAIN bookworm-backports main"
  [ -z "$SECURITY" ] || echo "deb $SIGNED $SECURITY bookworm-security main"; } > apt/sources.list
cat > apt.conf <<C
Dir::State::lists "$W/apt/lists"; Dir::State::status "$W/apt/status"; Dir::Cache "$W/apt/cache";
Dir::Etc::sourcelist "$W/apt/sources.list"; Dir::Etc::sourceparts "$W/apt/parts";
APT::Install-Recommends "false"; APT::Sandbox::User "root"; Debug::NoLocking "1";
C
export APT_CONFIG=$W/apt.conf
step "private apt update"; apt-get -qq update
step "download"
KPKG=$(apt-get -t bookworm-backports -s install linux-image-amd64 | awk '$1=="Inst" && $2 ~ /^linux-image-[0-9]/{print $2}')
KV=${KPKG#linux-image-}
apt-get -qq -t bookworm-backports download "$KPKG"
apt-get -qq -y --download-only install bash dash coreutils grep sed mawk diffutils util-linux mount kmod iproute2 procps \
  busybox-static python3 nvme-cli fio rdma-core ibverbs-providers ibverbs-utils rdmacm-utils >/dev/null
unset APT_CONFIG
step "root, without maintainer scripts"
rm -rf root k; mkdir -p root/usr/{bin,sbin,lib,lib64} root/{proc,sys,dev,tmp,run,share,mnt,root,etc}
for d in bin sbin lib lib64; do ln -s "usr/$d" "root/$d"; done
for d in apt/cache/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$d" | tar -x --keep-directory-symlink --exclude=./usr/share/{man,doc,locale} -C root
done
ln -sf mawk root/usr/bin/awk
echo 'root:x:0:0:root:/root:/bin/bash' > root/etc/passwd; echo 'root:x:0:' > root/etc/group
# What a maintainer script would have done: emulated, each start of Python would take its seconds again.
chroot root /usr/bin/python3 -m compileall -q -x '/(test|idlelib|lib2to3|turtledemo|ensurepip)/' /usr/lib/python3*
step "kernel $KV and modules"
mkdir k; dpkg-deb --fsys-tarfile "${KPKG}"_*.deb | tar -x -C k
cp "k/boot/vmlinuz-$KV" vmlinuz; [ -d k/lib ] || ln -s usr/lib k/lib
depmod -b k "$KV"
# rdma_rxe needs crc32_generic and crc32-pclmul, and modprobe does not know it.
MODULES="virtio_pci virtio_blk virtio_net virtio-rng 9p 9pnet_virtio ext4 nvme-fabrics nvme-tcp nvme-rdma nvmet nvmet-tcp
 nvmet-rdma rdma_rxe ib_uverbs rdma_ucm null_blk loop crc32_generic crc32-pclmul"
depends() { # the .ko files of modules, in the order to load them
  local base=$1; shift
  for m; do modprobe -d "$base" -S "$KV" --show-depends "$m" | awk '$1=="insmod"{print $2}'; done | awk '!s[$0]++'
}
depends "$W/k" $MODULES | while read -r f; do
  d=root/lib/modules/$KV/${f#*/lib/modules/$KV/}; mkdir -p "${d%/*}"
  case $f in *.xz) xz -dc "$f" > "${d%.xz}";; *) cp "$f" "$d";; esac
done
sed 's/\.ko\.xz/.ko/' "k/lib/modules/$KV/modules.order" > "root/lib/modules/$KV/modules.order"
cp "k/lib/modules/$KV/modules.builtin"{,.modinfo} "root/lib/modules/$KV/"; depmod -b root "$KV"; rm -rf k
step "init, initrd, image"
cat > root/usr/sbin/vminit <<'I'
#!/bin/bash
export PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C
mount -t tmpfs tmp /tmp; mount -t tmpfs run /run; mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm
P=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $P,cache=none share /share
for tag in $(tr ' ' '\n' < /proc/cmdline | sed -n 's/^forebay.mounts=//p' | tr , ' '); do
  mkdir -p "/mnt/$tag"; mount -t 9p -o $P,ro,cache=loose "$tag" "/mnt/$tag"
done
ip link set lo up; modprobe virtio_net
ip addr add 10.0.2.15/24 dev eth0; ip link set eth0 up; ip route add default via 10.0.2.2
mkdir -p /etc/nvme
cd /share; bash ./run.sh > /share/run.log 2>&1; echo $? > /share/run.rc
sync; busybox poweroff -f
I
chmod +x root/usr/sbin/vminit
rm -rf ird; mkdir -p ird/{bin,proc,sys,dev,newroot,m}; cp /bin/busybox ird/bin/
depends "$W/root" virtio_pci virtio_blk 9p 9pnet_virtio ext4 | while read -r f; do
  cp "$f" ird/m/; basename "$f" >> ird/m/order
done
cat > ird/init <<'I'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in $($b cat /m/order); do $b insmod /m/$m; done
$b mount -t ext4 -o noatime /dev/vda /newroot
for d in dev proc sys; do $b mount --move /$d /newroot/$d; done
exec $b switch_root /newroot /sbin/vminit
I
chmod +x ird/init; (cd ird; find . | cpio -o -H newc 2>/dev/null | gzip -1) > initrd.gz
rm -f root.img; mke2fs -q -F -t ext4 -O ^has_journal -m 0 -d root root.img 700M >/dev/null
rm -rf ird root apt apt.conf ./*.deb
step "done"
