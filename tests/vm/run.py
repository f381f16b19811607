"""Kill a virtual machine that trains on emulated persistent memory, boot it again, compare.

Run as `python tests/vm/run.py`; `make crash-vm` passes its ARGS on. One QEMU machine has an NVDIMM
with ext4 (DAX), an NVDIMM as DAX device, a CXL Type-3 memory with ext4 (DAX) and a virtio disk with
ext4; a pool on each is trained at the same time. QEMU is killed at a random moment, again and
again; every boot recovers the pools with the real drivers and compares them bit for bit. One line
of JSON for each; exits 1 if a pool was not as promised, 0 with a line that says "skipped" and why
where there is no QEMU or kernel.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import guest
from console import Console
from promises import Tally

MACHINES = ("nvdimm-ext4", "nvdimm-devdax", "cxl-ext4", "virtio-block")
KILLS_MIN = 3
BOOT_S = 420  # far more than a boot takes on a busy machine
BOOTS = 3  # an emulated machine on a busy host may not come up: that is no kill
FOREVER = 10**9
LAST_BATCHES = 100
IMAGES = {"nv1": "514M", "nv2": "514M", "cxl": "512M", "lsa": "1M", "disk": "256M"}
# The size of an NVDIMM less its label must be a multiple of 16 MiB. The second root port is needed:
# with one, QEMU 7.2 drops every write to the CXL memory.
QEMU_OPTIONS = """
-nodefaults -no-user-config -display none -monitor none -serial stdio -no-reboot
-smp 2 -cpu max -accel tcg -m 2G,slots=4,maxmem=12G
-machine q35,nvdimm=on,nvdimm-persistence=mem-ctrl,cxl=on
-M cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G
-object memory-backend-file,id=m1,share=on,mem-path={nv1},size=514M,align=2M
-device nvdimm,id=nv1,memdev=m1,label-size=2M
-object memory-backend-file,id=m2,share=on,mem-path={nv2},size=514M,align=2M
-device nvdimm,id=nv2,memdev=m2,label-size=2M
-object memory-backend-file,id=m3,share=on,mem-path={cxl},size=512M
-object memory-backend-file,id=m4,share=on,mem-path={lsa},size=1M
-device pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1
-device cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2
-device cxl-rp,port=1,bus=cxl.1,id=rp1,chassis=0,slot=3
-device cxl-type3,bus=rp0,memdev=m3,lsa=m4,id=cxl0,sn=4660
-drive if=none,id=d0,file={disk},format=raw,cache=writeback
-device virtio-blk-pci,drive=d0,bus=pcie.0
"""
SHARED_ROOT = """
-fsdev local,id=f0,path=/,security_model=none,readonly=on,multidevs=remap
-device virtio-9p-pci,fsdev=f0,mount_tag=root,bus=pcie.0
"""
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr cryptomgr.notests tsc=reliable "
    "random.trust_cpu=on no_timer_check"
)


class Rig:
    """One set of images and the lives of the machine that uses them."""

    def __init__(self, args: argparse.Namespace, kernel: Path, initramfs: Path) -> None:
        self.args = args
        self.random = random.Random(args.seed)
        self.folder = args.build / "run"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.images = {name: self.folder / f"{name}.img" for name in IMAGES}
        for name, size in IMAGES.items():
            guest.run("truncate", "-s", size, self.images[name])
        self.boot_files = ["-kernel", str(kernel), "-initrd", str(initramfs)]
        self.tallies = {name: Tally(name) for name in args.machines}
        self.life = 0
        self.failed_boots = 0

    def command(self, batches: int, python: str = "") -> list[str]:
        """The command line of QEMU for the next life."""
        fresh = [t.name for t in self.tallies.values() if not t.opened and not t.is_known]
        arguments = (
            f"{KERNEL_OPTIONS} machines={','.join(self.tallies)} fresh={','.join(fresh)} "
            f"life={self.life} batches={batches} control={self.args.control} {python}"
        )
        options = QEMU_OPTIONS.format(**self.images).split()
        if python:
            options += SHARED_ROOT.split()
        return ["nice", "-n", "10", guest.QEMU, *options, *self.boot_files, "-append", arguments]

    def hear(self, console: Console, name: str, event: str, rest: str) -> None:
        """Note a line of the guest."""
        console.count(name, event)
        if name in self.tallies:
            self.tallies[name].hear(event, rest)

    def is_over(self, console: Console, kind: str, wanted: dict[str, int]) -> bool:
        """Whether the moment has come from which the kill is drawn."""
        if kind == "opening":
            return any(console.has(name, "opening") >= count for name, count in wanted.items())
        return all(
            console.has(name, "durable") >= count or console.has(name, "ended")
            for name, count in wanted.items()
        )

    def kill_once(self) -> None:
        """A life that ends with the death of the machine."""
        # The first kill falls into the creation of a pool, every third one into a recovery.
        kind = "opening" if self.life % 3 == 0 else "training"
        names = list(self.tallies)
        wanted = {name: self.random.randint(2, 40) for name in names}
        if kind == "opening":
            wanted = {names[self.life // 3 % len(names)]: 1}
        delay = self.random.uniform(0, 1.5)
        for _ in range(BOOTS):
            with Console(self.command(FOREVER), self.log()) as console:
                self.live(console, kind, wanted, delay)
            if console.has("all", "booted"):
                break
        for name, tally in self.tallies.items():
            tally.kills += 1
            tally.kills_opening += bool(
                console.has(name, "opening") and not console.has(name, "durable")
            )
        self.life += 1

    def log(self) -> Path:
        """Where the console of this life goes."""
        return self.folder / f"console.{self.life}.log"

    def live(self, console: Console, kind: str, wanted: dict[str, int], delay: float) -> None:
        """Listen until the moment has come and so many seconds more; kill."""
        deadline, kill_at = time.monotonic() + BOOT_S, None
        while kill_at is None or time.monotonic() < kill_at:
            for line in console.lines(kill_at if kill_at is not None else deadline):
                self.hear(console, *line)
            if kill_at is None and self.is_over(console, kind, wanted):
                kill_at = time.monotonic() + delay
            if time.monotonic() > deadline or console.is_closed:
                self.note_silence(console)
                break
        console.kill()
        for line in console.rest():
            self.hear(console, *line)

    def note_silence(self, console: Console) -> None:
        """The guest stopped, or is too slow, before every pool was where it should be."""
        if not console.has("all", "booted") and self.failed_boots < BOOTS:
            self.failed_boots += 1
            print(f"vm: the guest did not boot: {self.log()}", file=sys.stderr)
            return
        for name, tally in self.tallies.items():
            if not console.has(name, "durable"):
                tally.mismatches.append(f"life {self.life}: no batch within {BOOT_S} s")

    def end(self, python: str) -> dict[str, Any] | None:
        """The last life: recovers, trains on, closes in order; the Python test's result."""
        result = None
        for _ in range(BOOTS):
            with Console(self.command(LAST_BATCHES, python), self.log()) as console:
                deadline = time.monotonic() + 2 * BOOT_S
                while not console.is_closed and time.monotonic() < deadline:
                    for name, event, rest in console.lines(deadline):
                        if name == "python" and event == "result":
                            result = json.loads(rest)
                        self.hear(console, name, event, rest)
            if console.has("all", "booted"):
                break
        for name, tally in self.tallies.items():
            if not console.has(name, "done"):
                tally.mismatches.append("the last life did not end in order")
        return result


def smoke_arguments(args: argparse.Namespace) -> str:
    """What the guest needs to run this Python through the shared root; empty: not wanted."""
    if args.no_python or args.control or not {"nvdimm-ext4", "nvdimm-devdax"} <= set(args.machines):
        return ""
    return f"python={sys.executable} smoke={guest.HERE / 'guest_smoke.py'}"


def rig(args: argparse.Namespace) -> int:
    """Build, kill, compare, print; the exit status."""
    guest.ensure_tools()
    args.build.mkdir(parents=True, exist_ok=True)
    kernel = guest.unpack_kernel(args.build, args.kernel_deb)
    initramfs = guest.build_initramfs(args.build, kernel, guest.build_program(args.build))
    began = time.monotonic()
    lives = Rig(args, kernel / "vmlinux", initramfs)
    while lives.life < args.kills:
        if lives.life >= KILLS_MIN and time.monotonic() - began > 60 * args.minutes:
            break
        lives.kill_once()
        print(f"vm: kill {lives.life}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    python = smoke_arguments(args)
    result = lives.end(python)
    seconds = time.monotonic() - began
    for tally in lives.tallies.values():
        print(json.dumps(tally.line(seconds)), flush=True)
        for mismatch in tally.mismatches:
            print(f"vm: {tally.name}: {mismatch}", file=sys.stderr)
    if args.control:
        found = [tally.name for tally in lives.tallies.values() if tally.mismatches]
        print(json.dumps({"rig": "vm", "control": args.control, "found": found}), flush=True)
        return int(not found)
    bad = sum(len(tally.mismatches) for tally in lives.tallies.values())
    if python:
        answer = result or {"error": "no result"}
        print(json.dumps({"rig": "vm", "machine": "python", **answer}), flush=True)
        bad += "error" in answer
    if bad:
        print(f"vm: consoles are in {lives.folder}", file=sys.stderr)
    else:
        for image in lives.images.values():
            image.unlink()
    return int(bad > 0)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=9, help="of the machine")
    parser.add_argument("--minutes", type=float, default=12, help="no more kills after so long")
    parser.add_argument("--machines", default=",".join(MACHINES), help="which pools to train")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments")
    parser.add_argument("--no-python", action="store_true", help="leave out the Python test")
    parser.add_argument("--control", default="", choices=["", "early"], help="a fault to be found")
    parser.add_argument("--kernel-deb", type=Path, help="kernel package to boot (Linux 6.1)")
    parser.add_argument("--build", type=Path, default=guest.ROOT / "build/vm", help="folder")
    args = parser.parse_args()
    args.build = args.build.resolve()
    args.machines = args.machines.split(",")
    if unknown := set(args.machines) - set(MACHINES):
        parser.error(f"unknown machine {', '.join(unknown)}; there are {', '.join(MACHINES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that QEMU is ended, too
    try:
        return rig(args)
    except guest.Unavailable as reason:
        print(json.dumps({"rig": "vm", "skipped": str(reason)}))
        return 0


if __name__ == "__main__":
    sys.exit(main())
