#!/bin/busybox sh
# Process 1 of the guest (run.py): loads the drivers, makes or finds the persistent memories, file
# systems and pools of the machines named in $machines, and trains on all of them at once.
#
# From the kernel's command line: machines (names, comma separated), fresh (those of them that have
# no pool yet), life, batches, control (vm_train.cc); python and smoke: the Python test's program.
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /tmp /run /mnt /etc
mount -t tmpfs tmp /tmp
mkdir /tmp/ready
export ready=/tmp/ready

stop() {
  echo "@all stopped $1"
  sync
  poweroff -f
}

# The namespace of a region in this mode, made where there is none yet. A new NVDIMM shows itself as
# one raw namespace, which is converted; a new CXL region has none.
namespace() { # region mode
  ndctl list -N -r "region$1" 2>/dev/null | grep -q "\"mode\":\"$2\"" && return 0
  local from="-r region$1"
  [ "$(cat "/sys/bus/nd/devices/namespace$1.0/size")" = 0 ] || from="-e namespace$1.0"
  ndctl create-namespace -f $from -m "$2" -M dev >/tmp/namespace.$1 2>&1 && return 0
  cat /tmp/namespace.$1
  return 1
}

wait_for() { # path
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    [ -e "$1" ] && return 0
    sleep 0.2
  done
  echo "@all missing $1"
  return 1
}

is_fresh() { # name
  case ",$fresh," in *",$1,"*) return 0 ;; esac
  return 1
}

# A file system on a device, made as long as it holds no pool; what a killed mkfs left, again.
mounted() { # name device options
  wait_for "$2" || return 1
  mkdir -p "/mnt/$1"
  if ! mount -t ext4 $3 "$2" "/mnt/$1" 2>/tmp/mount.$1; then
    is_fresh "$1" || { cat /tmp/mount.$1; return 1; }
    mkfs.ext4 -q -b 4096 "$2" && mount -t ext4 $3 "$2" "/mnt/$1"
  fi
}

train() { # name device
  vm_train "$1" "/mnt/$1/test.pool" "$life" "$batches" $2
  echo "@$1 ended $?"
}

machine() { # name
  case $1 in
    nvdimm-ext4) namespace 0 fsdax && mounted $1 /dev/pmem0 "-o dax=always" && train $1 ;;
    nvdimm-devdax)
      mkdir -p /mnt/$1
      namespace 1 devdax && wait_for /dev/dax1.0 && train $1 /dev/dax1.0 ;;
    cxl-ext4)
      region=$(cxl create-region -t pmem -m -d decoder0.0 -w 1 -g 4096 mem0 2>&1 |
        sed -n 's/.*"region":"region\([0-9]*\)".*/\1/p')
      namespace "$region" fsdax && mounted $1 "/dev/pmem$region" "-o dax=always" && train $1 ;;
    virtio-block) mounted $1 /dev/vda "" && train $1 ;;
  esac || echo "@$1 ended 9"
}

for module in $(cat /modules/order); do insmod "/modules/$module.ko"; done
echo "@all booted $(cut -d' ' -f1 /proc/uptime)"
# The host's Python, through its root, opens pools on persistent memory that were just closed.
smoke_test() {
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro root /r || return 1
  for folder in /dev /proc /sys /tmp; do mount -o bind $folder /r$folder; done
  mount -o rbind /mnt /r/mnt || return 1
  chroot /r "$python" "$smoke" /mnt
}

for name in $(echo "$machines" | tr , ' '); do machine "$name" & done
wait
[ -z "$python" ] || smoke_test || echo "@python ended $?"
stop "in order"
