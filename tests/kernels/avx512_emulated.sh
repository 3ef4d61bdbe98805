#!/bin/sh
# The AVX-512 table on an emulated processor (bochs, skylake-x), for machines without AVX-512:
#
#   make build-tests && KERNEL=/boot/vmlinuz-... tests/kernels/avx512_emulated.sh [BUILD_FOLDER]
#
# Boots a Linux kernel (with a serial console; any of Debian's) with only busybox, the tests of the kernels
# and the command. Checks that
#   - the AVX-512 table is found, and gives the same bits as the others (test_kernels, test_lattice_kernels,
#     test_lossy_kernels);
#   - a lossy chain saved on this machine loads to the same bytes in the emulator, and one saved in the
#     emulator with one thread loads to the same bytes in both, on AVX-512 and with 8 threads on the portable
#     table;
#   - if the processor has AVX-512 but the system does not save its registers (clearcpuid), the table is not
#     found.
# Needs Debian's bochs, bochs-term, isolinux, syslinux-common, genisoimage, cpio, busybox-static, bsdutils,
# and a kernel: /boot/vmlinuz-*, or that of a package (apt-get download linux-image-...-cloud-amd64; dpkg -x).
# Takes a few minutes. Exit status 77: skipped, with the reason.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build/current}
kernel=${KERNEL:-$(ls /boot/vmlinuz-* 2>/dev/null | tail -n 1)}
isolinux=${ISOLINUX:-/usr/lib/ISOLINUX/isolinux.bin}
modules=${SYSLINUX:-/usr/lib/syslinux/modules/bios}

skip() {
    echo "SKIP: $*"
    exit 77
}
fail() {
    echo "FAILED: $*"
    exit 1
}
for tool in bochs genisoimage cpio script; do
    command -v "$tool" >/dev/null || skip "there is no $tool here"
done
busybox=$(command -v busybox) || skip "there is no busybox here"
! ldd "$busybox" >/dev/null 2>&1 || skip "$busybox is not static (busybox-static is)"
[ -r "$isolinux" ] && [ -r "$modules/ldlinux.c32" ] || skip "there is no isolinux here"
[ -r "${kernel:-/none}" ] || skip "there is no Linux kernel here; KERNEL=FILE names one"
programs="test_kernels test_lattice_kernels test_lossy_kernels"
for p in $programs; do
    [ -x "$build/tests/$p" ] || fail "$build/tests/$p is not built: make build-tests"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(scripts/find-python.sh)

# --- a chain of four checkpoints, and the bytes that they load to
"$python" - "$work" <<'PY'
import pathlib
import sys
sys.path.insert(0, "tests/support")
import numpy
from support_safetensors import write

random = numpy.random.default_rng(1)
rows, columns = 200, 136
scale = numpy.exp(random.standard_normal((rows, 1))) * numpy.exp(random.standard_normal((1, columns)))
w = random.standard_normal((rows, columns)) * 0.02
for step in range(4):
    moved = random.standard_normal((rows, 6)) @ random.standard_normal((6, columns))
    w += 3e-4 * (moved + 0.5 * random.standard_normal((rows, columns)))
    m = scale * random.standard_normal((rows, columns)) * 1e-4
    v = scale * scale * (random.standard_normal((rows, columns)) ** 2 + 0.1) * 1e-8
    tensors = {"w": w, "exp_avg.w": m, "exp_avg_sq.w": v, "b": w[0], "h": w.astype("<f2")}
    write(pathlib.Path(sys.argv[1]) / f"{step}.safetensors",
          {name: x if x.dtype == "<f2" else x.astype("<f4") for name, x in tensors.items()})
PY
cat >"$work/chain" <<'E2'
#!/bin/sh
# chain COMMAND FOLDER STORE: saves
set -e
for s in 0 1 2 3; do
    "$1" save "$3" --run r --step $s --fidelity coarse --max-load-cost 16 --threads 1 -q "$2/$s.safetensors"
done
E2
cat >"$work/sums" <<'E2'
#!/bin/sh
# sums COMMAND STORE THREADS: of all that it loads to
set -e
for s in 0 1 2 3; do
    "$1" load "$2" --run r --step $s --threads "$3" -q --force --out "${TMPDIR:-/tmp}/loaded"
    md5sum <"${TMPDIR:-/tmp}/loaded"
done
E2
chmod +x "$work/chain" "$work/sums"
export TMPDIR="$work"
"$work/chain" "$build/ckptdelta" "$work" "$work/here"
"$work/sums" "$build/ckptdelta" "$work/here" 2 >"$work/here.sums"

# --- the system: busybox, programs, their libraries
root=$work/root
mkdir -p "$root/bin" "$root/t" "$root/proc" "$root/dev" "$root/sys" "$root/tmp"
cp "$busybox" "$root/bin/busybox"
for a in sh mount cat grep md5sum tar gzip stty sleep poweroff cmp; do
    ln -s busybox "$root/bin/$a"
done
for p in $programs; do
    cp "$build/tests/$p" "$root/bin/"
done
cp "$build/ckptdelta" "$work/chain" "$work/sums" "$root/bin/"
strip "$root/bin/ckptdelta" "$root"/bin/test_*
cp -r "$work/here" "$work/here.sums" "$work"/[0-3].safetensors "$root/t/"
ldd "$root"/bin/ckptdelta "$root"/bin/test_* | grep -o '/[^ ]*' | grep -v ':$' | sort -u | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done
cat >"$root/init" <<'E2'
#!/bin/sh
export PATH=/bin TMPDIR=/tmp
mount -t proc proc /proc
mount -t devtmpfs dev /dev
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
run() {
    echo "run: $*"
    "$@" 2>&1 && echo "ok: $*" || echo "not ok: $*"
}
run test_kernels
if ! grep -q only-kernels /proc/cmdline; then
    run test_lattice_kernels
    run test_lossy_kernels
    sums ckptdelta /t/here 1 >/tmp/avx512
    run cmp /tmp/avx512 /t/here.sums
    run chain ckptdelta /t /tmp/there
    sums ckptdelta /tmp/there 1 >/tmp/there.avx512
    CKD_CPU=portable sums ckptdelta /tmp/there 8 >/tmp/there.portable
    run cmp /tmp/there.avx512 /tmp/there.portable
    stty -F /dev/ttyS1 115200 raw
    (cd /tmp && tar -cz there there.avx512) >/dev/ttyS1
fi
echo "the end"
sleep 3
poweroff -f
E2
chmod +x "$root/init"

# boot NAME OPTION...: boots with these options. The console goes to $work/NAME.console, and the other serial
# line to $work/NAME.out.
boot() {
    name=$1
    shift
    disc=$work/$name
    mkdir -p "$disc/isolinux"
    (cd "$root" && find . | cpio -o -H newc 2>/dev/null) >"$disc/isolinux/initrd"
    cp "$kernel" "$disc/isolinux/vmlinuz"
    cp "$isolinux" "$modules/ldlinux.c32" "$disc/isolinux/"
    cat >"$disc/isolinux/isolinux.cfg" <<E2
DEFAULT linux
PROMPT 0
LABEL linux
 LINUX vmlinuz
 INITRD initrd
 APPEND console=ttyS0,115200 quiet nokaslr mitigations=off tsc=reliable noapic nosmp $*
E2
    genisoimage -quiet -o "$work/$name.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
        -boot-load-size 4 -boot-info-table "$disc"
    cat >"$work/$name.bochs" <<E2
megs: 768
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, count=1, ips=100000000, reset_on_triple_fault=0
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$work/$name.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/$name.console
com2: enabled=1, mode=file, dev=$work/$name.out
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
display_library: term
log: $work/$name.log
clock: sync=none, time0=utc
panic: action=fatal
error: action=ignore
info: action=ignore
E2
    echo c >"$work/continue" # Debian's bochs is one with a debugger
    TERM=xterm timeout 1800 script -qec "stty rows 60 cols 140; bochs -q -f $work/$name.bochs -rc $work/continue" /dev/null \
        </dev/null >/dev/null 2>&1 || true
    tr -d '\r' <"$work/$name.console"
    grep -q '^the end' "$work/$name.console" || fail "$name: it did not come to its end"
    ! grep -q '^not ok' "$work/$name.console" || fail "$name: a test failed"
}

# Disables XSAVEC and XSAVES: the emulator reports inconsistent sizes for them, so that Linux would not use
# XSAVE at all.
boot avx512 clearcpuid=321,323
grep -q '^tables: .*avx512' "$work/avx512.console" || fail "the AVX-512 table was not found"
[ "$(grep -c '^ok: ' "$work/avx512.console")" = 6 ] || fail "not all was run"
tar -xzf "$work/avx512.out" -C "$work"
CKD_CPU=portable "$work/sums" "$build/ckptdelta" "$work/there" 8 | cmp - "$work/there.avx512" ||
    fail "what AVX-512 saved is something else on this machine's portable path"

# Disables AVX512F, too: the processor reports it, but the system does not save its registers.
boot without only-kernels clearcpuid=304,321,323
grep -q '^ok: test_kernels' "$work/without.console" || fail "not all was run without AVX-512"
grep -q '^tables: ' "$work/without.console" || fail "no table was named"
! grep -q '^tables: .*avx512' "$work/without.console" || fail "AVX-512 was taken without the system's leave"
echo "passed"
