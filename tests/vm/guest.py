"""What the virtual machine rig boots: packages, kernel, the static test program, the initramfs.

Everything is kept in one folder and made again only when what it is made of has changed. Whatever
cannot be had raises Unavailable with what to do.
"""

import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = "qemu-system-x86 ndctl busybox-static cpio kmod e2fsprogs binutils"
QEMU = "qemu-system-x86_64"
TOOLS = (QEMU, "ndctl", "cxl", "busybox", "cpio", "modprobe", "depmod", "mkfs.ext4", "strip")
GUEST_TOOLS = ("ndctl", "cxl", "mkfs.ext4")
# In this order: regions of NVDIMMs get the first numbers, which init.sh counts on.
MODULES = (
    "virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "nfit", "nd_pmem", "dax_pmem",
    "device_dax", "cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem", "9p", "9pnet_virtio",
)  # fmt: skip
XZ = re.compile(rb"\xfd7zXZ\x00")


class Unavailable(Exception):
    """The rig cannot run here; says why and what to do."""


def run(*command: str | Path, folder: Path | None = None) -> str:
    """Run a command and return what it prints; Unavailable when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise Unavailable(f"'{' '.join(map(str, command))}' failed: {' / '.join(last)}")
    return done.stdout


def ensure_tools() -> None:
    """Find QEMU and the tools; install them where this user may."""
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"vm: apt-get install {PACKAGES}", file=sys.stderr)
        run("apt-get", "-q", "update")
        run("apt-get", "-q", "install", "-y", "--no-install-recommends", *PACKAGES.split())
        missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        raise Unavailable(
            f"missing: {', '.join(missing)}; as root: "
            f"apt-get install --no-install-recommends {PACKAGES}"
        )


def kernel_package() -> str:
    """Name of the package with the distribution's kernel."""
    if shutil.which("apt-cache") is None:
        raise Unavailable("no apt to get a kernel package from; give one with --kernel-deb")
    for line in run("apt-cache", "depends", "linux-image-amd64").splitlines():
        if found := re.search(r"Depends: (linux-image-\d\S*)", line):
            return found[1]
    raise Unavailable("linux-image-amd64 is unknown to apt (apt-get update, or --kernel-deb)")


def unpack_kernel(folder: Path, package: Path | None) -> Path:
    """Folder of the unpacked kernel package; fetched unless `package` is a file."""
    unpacked = folder / "kernel"
    source = str(package.resolve()) if package else kernel_package()
    note = unpacked / "source"
    if note.exists() and note.read_text() == source:
        return unpacked
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir(parents=True)
    if package is None:
        print(f"vm: apt-get download {source} (70 MB)", file=sys.stderr)
        run("apt-get", "-q", "download", source, folder=unpacked)
        package = next(unpacked.glob("*.deb"))
    run("dpkg", "-x", package, unpacked)
    if not list((unpacked / "boot").glob("vmlinuz-*")):
        raise Unavailable(f"'{source}' holds no kernel")
    run("depmod", "-b", unpacked, version_of(unpacked))
    extract_vmlinux(unpacked)
    note.write_text(source)
    return unpacked


def version_of(unpacked: Path) -> str:
    """Version of the unpacked kernel, as its files spell it."""
    return next((unpacked / "boot").glob("vmlinuz-*")).name.removeprefix("vmlinuz-")


def extract_vmlinux(unpacked: Path) -> None:
    """The bare kernel: unpacking it in the guest would take an emulated CPU 15 s a boot."""
    packed = next((unpacked / "boot").glob("vmlinuz-*")).read_bytes()
    kernel = packed
    for match in XZ.finditer(packed):
        try:
            found = lzma.LZMADecompressor().decompress(packed[match.start() :])
        except lzma.LZMAError:
            continue
        if found.startswith(b"\x7fELF"):
            kernel = found
            break
    (unpacked / "vmlinux").write_bytes(kernel)


def build_program(folder: Path) -> Path:
    """The test program, statically linked from the project's own core."""
    build = folder / "program"
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DTCXL_VM=ON"],
        ["cmake", "--build", str(build), "--", "-j", "2", "vm_train"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:  # our own fault: no reason to skip
            sys.exit(f"vm: '{' '.join(command)}' failed:\n{done.stdout}{done.stderr}")
    return build / "vm_train"


def build_initramfs(folder: Path, unpacked: Path, program: Path) -> Path:
    """The guest's first file system: busybox, drivers, tools with their libraries, the program."""
    image = folder / "initrd.gz"
    parts = [program, HERE / "init.sh", unpacked / "source", Path(__file__)]
    if image.exists() and all(p.stat().st_mtime <= image.stat().st_mtime for p in parts):
        return image
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "r"):
        (root / name).mkdir(parents=True)
    copy_modules(unpacked, root / "modules")
    for name in ("busybox", *GUEST_TOOLS):
        copy_tool(Path(str(shutil.which(name))), root)
    run("strip", "-o", root / "bin" / program.name, program)
    shutil.copy(HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    run("sh", "-c", f"find . | cpio -o -H newc --quiet | gzip -1 > '{image}.new'", folder=root)
    Path(f"{image}.new").replace(image)
    return image


def copy_modules(unpacked: Path, to: Path) -> None:
    """MODULES and what they need, unpacked, with the order in which to load them."""
    order: list[str] = []
    for name in MODULES:
        # Without the rules of this machine: one of them hides a driver.
        lines = run(
            "modprobe", "-C", "/dev/null", "-d", unpacked, "-S", version_of(unpacked),
            "--show-depends", name,
        )  # fmt: skip
        for line in lines.splitlines():
            if not line.startswith("insmod"):
                continue  # built in
            path = Path(line.split()[1])
            stem = path.name.partition(".")[0]
            if stem in order:
                continue
            order.append(stem)
            content = path.read_bytes()
            packed = path.suffix == ".xz"
            (to / f"{stem}.ko").write_bytes(lzma.decompress(content) if packed else content)
    (to / "order").write_text("\n".join(order) + "\n")


def copy_tool(tool: Path, root: Path) -> None:
    """A program and the libraries that it is linked with."""
    shutil.copy(tool, root / "bin")
    linked = subprocess.run(["ldd", tool], capture_output=True, text=True, check=False)
    for library in re.findall(r"(?:=> |^\s*)(/\S+)", linked.stdout, flags=re.MULTILINE):
        to = root / library.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), to)
