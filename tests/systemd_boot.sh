#!/bin/bash
# Boots systemd as the first process of namespaces of its own, on an overlay of this machine's root:
#
#     systemd_boot.sh FOLDER CHECKOUT SITE-PACKAGES PYTHON-PREFIX
#
# Needs root. FOLDER/up holds what the machine changed, FOLDER/pid the pid of its systemd here. The
# whyidle of CHECKOUT is installed as /usr/local/bin/whyidle. Ends with its standard input: nothing is
# left behind.
set -euo pipefail
folder=$1 checkout=$2 site=$3 prefix=$4

if [ "${5:-}" != inside ]; then
    # One cgroup in every hierarchy, so that the machine's own stay out of its reach.
    name=whyidle-test-$$
    hierarchies=()
    while read -r _ where type _; do
        case $type in cgroup | cgroup2) hierarchies+=("$where") ;; esac
    done </proc/mounts
    for where in "${hierarchies[@]}"; do
        mkdir -p "$where/$name"
        for file in cpuset.cpus cpuset.mems; do
            [ ! -e "$where/$name/$file" ] || cat "$where/$file" >"$where/$name/$file" || true
        done
    done
    (
        for where in "${hierarchies[@]}"; do echo "$BASHPID" >"$where/$name/cgroup.procs"; done
        exec unshare --pid --mount --fork --cgroup --uts --ipc --net --kill-child \
            "$0" "$folder" "$checkout" "$site" "$prefix" inside </dev/null
    ) &
    outside=$!
    trap 'kill -KILL "$outside" 2>/dev/null || true; wait 2>/dev/null || true
        for where in "${hierarchies[@]}"; do
            for _ in $(seq 50); do
                find "$where/$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
                [ -e "$where/$name" ] || break
                sleep 0.1
            done
        done' EXIT
    trap 'exit 143' TERM INT HUP
    for _ in $(seq 100); do
        child=$(cat "/proc/$outside/task/$outside/children" 2>/dev/null || true)
        [ -z "$child" ] || [ "$(cat "/proc/${child% }/comm")" != systemd ] || break
        sleep 0.1
    done
    echo "${child% }" >"$folder/pid"
    cat >/dev/null # until the test closes our standard input
    exit 0
fi

mount --make-rprivate /
before=$(cat /proc/mounts)
root=$folder/root
mkdir -p "$root"
mount -t tmpfs -o mode=755 tmpfs "$root"
mkdir "$root/up" "$root/work" "$root/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/up,workdir=$root/work" "$root/root"
base=$root
root=$root/root

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
while read -r _ where type options _; do
    case $type in
    cgroup) # of the version 1: the controllers are among the options
        mkdir -p "$root$where"
        wanted=$(tr , '\n' <<<"$options" | grep -vxE 'rw|ro|nosuid|nodev|noexec|relatime|xattr|release_agent=.*' | paste -sd,)
        case $wanted in name=*) wanted=none,$wanted ;; esac
        mount -t cgroup -o "$wanted" cgroup "$root$where"
        ;;
    cgroup2)
        [ "$where" = /sys/fs/cgroup ] || mkdir -p "$root$where"
        mount -t cgroup2 cgroup2 "$root$where"
        ;;
    esac
done <<<"$before"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for node in null zero full random urandom tty kmsg; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done

# Python and whyidle, where no user and no hardening hides them.
mkdir -p "$root/opt/python" "$root/opt/site" "$root/opt/checkout" "$root/opt/whyidle/bin"
mount --bind "$prefix" "$root/opt/python"
mount --bind "$site" "$root/opt/site"
mount --bind "$checkout" "$root/opt/checkout"
version=$(basename "$(dirname "$site")")
ln -s "/opt/python/bin/$version" "$root/opt/whyidle/bin/python"
printf 'home = /opt/python/bin\ninclude-system-site-packages = false\n' >"$root/opt/whyidle/pyvenv.cfg"
mkdir -p "$root/opt/whyidle/lib/$version/site-packages"
printf '/opt/checkout/agent\n/opt/checkout/rules\n/opt/site\n' \
    >"$root/opt/whyidle/lib/$version/site-packages/whyidle.pth"
cat >"$root/usr/local/bin/whyidle" <<'END'
#!/opt/whyidle/bin/python
import sys
from whyidle_rules.cli import main
sys.exit(main())
END
chmod 755 "$root/usr/local/bin/whyidle"
"$checkout/systemd/install" "$root"
# A Python that was built with a shared library finds it where it was built for.
mkdir -p "$root/etc/default"
echo LD_LIBRARY_PATH=/opt/python/lib >"$root/etc/default/whyidle"

# A machine that boots in a second: nothing of this one is started, the journal stays in memory.
: >"$root/etc/fstab"
echo whyidle-test >"$root/etc/hostname"
hostname whyidle-test
rm -rf "$root/etc/systemd/system" "$root/var/log/journal" "$root/var/lib/whyidle"
mkdir -p "$root/etc/systemd/system" "$root/etc/systemd/journald.conf.d"
printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' \
    >"$root/etc/systemd/journald.conf.d/test.conf"
for unit in systemd-udevd.service systemd-timesyncd.service systemd-networkd.service getty.target; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done
cat >"$root/etc/systemd/system/whyidle-test.target" <<'END'
[Unit]
Requires=sysinit.target
Wants=dbus.socket
After=sysinit.target dbus.socket
AllowIsolate=yes
END

cd "$root"
mkdir -p old
pivot_root . old
umount -l /old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=whyidle-test \
    /lib/systemd/systemd --system --unit=whyidle-test.target >/dev/null 2>&1
