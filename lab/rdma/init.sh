#!/bin/sh
# Guest init: file systems, two rxe devices, then host commands until the host closes the console.
#
# Set on the kernel's command line: LAB_GUEST (index), LAB_FOLDER (folder that host and guest
# share). /dev/tty1: a script's path for each line, and its standard output. /dev/tty2: its standard
# error. A line "\036 STATUS" on both ends a script's output.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2> /dev/null || true
mkdir -p /dev/shm /dev/pts
mount -t tmpfs none /dev/shm
mount -t devpts none /dev/pts
mount -t tmpfs none /run
chmod 1777 /dev/shm /run

# The host's /tmp stays visible: it may contain the repository. Changes are the guest's own.
mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/tmp,upperdir=/run/upper,workdir=/run/work none /tmp
mount -t hostfs -o "$LAB_FOLDER" none "$LAB_FOLDER"
# The host's processor: perftest reads the frequency.
mount --bind "$LAB_FOLDER/cpuinfo" /proc/cpuinfo

# Without NUMA nodes in sysfs, libraries take their NICs for absent and fall back to TCP.
mkdir -p /run/system/node/node0
cp -r /sys/devices/system/. /run/system 2> /dev/null || true
echo 0 | tee /run/system/node/online /run/system/node/possible \
    /run/system/node/has_cpu /run/system/node/node0/cpulist > /run/system/node/has_memory
echo 1 > /run/system/node/node0/cpumap
echo 10 > /run/system/node/node0/distance
mount --bind /run/system /sys/devices/system

ip link set lo up
for network in 0 1; do
    ip address add "10.0.$network.$((LAB_GUEST + 1))/24" dev "vec$network"
    ip link set "vec$network" up
    rdma link add "rxe$network" type rxe netdev "vec$network"
done
ulimit -l unlimited
ulimit -c 0

stty -F /dev/tty1 raw -echo
stty -F /dev/tty2 raw -echo
exec < /dev/tty1 > /dev/tty1 2> /dev/tty2
stty icanon
printf '\036 0\n' | tee /dev/tty2
while IFS= read -r script; do
    status=0
    sh "$script" < /dev/null || status=$?
    sync "$LAB_FOLDER"
    printf '\036 %s\n' "$status" | tee /dev/tty2
done

umount "$LAB_FOLDER" 2> /dev/null || sync
# reboot(RB_POWER_OFF): the machine may have no program for it.
exec perl -e 'syscall(169, 0xfee1dead, 672274793, 0x4321fedc)'
