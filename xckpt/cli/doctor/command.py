"""The command `xckpt doctor`: what it examines, and how it prints that."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import click

from xckpt.cli.arguments import PATH, as_json
from xckpt.cli.output import Fault, print_json, say
from xckpt.cli.render.columns import columns

if TYPE_CHECKING:
    from xckpt.cli.doctor.findings import Diagnosis, Machine, Remark
    from xckpt.storage.abilities.bucket import BucketAbilities
    from xckpt.storage.abilities.local import LocalAbilities

REQUIRED: Final = "numpy tensorstore ml_dtypes msgspec xxhash google_crc32c tomli_w"
OPTIONAL: Final = "click rich matplotlib obstore torch torch_xla jax jaxlib flax zarr"
PACKAGES: Final = ("xckpt", *REQUIRED.split(), *OPTIONAL.split())
VARIABLES: Final = (
    *("XCKPT_RETRIES", "XCKPT_TIMEOUT", "XCKPT_REQUEST_TIMEOUT", "XCKPT_CONCURRENCY"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "WORLD_SIZE", "RANK", "SLURM_NTASKS", "NO_COLOR"),
)
"""Variables that are shown if they are set; none holds a secret."""


@click.command("doctor")
@click.argument("path", default=".", required=False, type=PATH)
@as_json
def doctor_command(path: str, as_json: bool) -> None:
    """Show versions, and what the storage at PATH can do.

    Also says what will be slow there, and why. PATH is a folder, which need not exist, or a bucket;
    the working folder by default. A trial file or key is made there, and removed. Exit code 0:
    saves will work. 1: they will not.
    """
    found = diagnosed(path)
    if as_json:
        print_json(found)
    else:
        for line in lines(found):
            say(line)
    faults = [remark.text for remark in found.remarks if remark.kind == "fails"]
    if faults:
        raise Fault(f"{path}: a save here would fail", faults)


def diagnosed(path: str) -> Diagnosis:
    """Look at this process, and at the storage of a path.

    Example:
        >>> remarks = diagnosed("s3:///no-bucket").remarks
        >>> [remark.kind for remark in remarks if remark.kind == "fails"]
        ['fails']
    """
    from xckpt.cli.doctor import findings
    from xckpt.errors import StorageError
    from xckpt.storage.abilities.bucket import bucket_abilities
    from xckpt.storage.abilities.local import local_abilities
    from xckpt.storage.location import Location

    machine, packages = this_machine(), {name: _version(name) for name in PACKAGES}
    local = bucket = None
    remarks = [*findings.of_machine(machine, packages)]
    try:
        location = Location.parse(path)
        if location.folder is not None:
            local = local_abilities(location.folder)
            remarks += findings.of_local(local)
        else:
            bucket = bucket_abilities(location)
            remarks += findings.of_bucket(bucket)
    except StorageError as error:
        remarks.append(findings.Remark("fails", str(error)))
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return findings.Diagnosis(machine, packages, variables, path, local, bucket, tuple(remarks))


def this_machine() -> Machine:
    """What this process runs on."""
    from xckpt.cli.doctor.findings import Machine
    from xckpt.options import processors

    memory = None
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Machine(system, platform.python_version(), processors(), memory, _open_files())


def _open_files() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def lines(found: Diagnosis) -> Iterator[str]:
    """The lines of a diagnosis.

    Example:
        >>> from xckpt.cli.doctor.findings import Diagnosis, Machine
        >>> machine = Machine("Linux 6.1 x86_64", "3.12.1", 4, 8 << 30, 1024)
        >>> found = Diagnosis(machine, {"torch": None}, {"RANK": "0"}, ".", None, None, ())
        >>> for line in lines(found):
        ...     print(line)
        system  Linux 6.1 x86_64, 4 processors, 8.0 GiB
        python  3.12.1
        torch   not installed
        RANK=0
        <BLANKLINE>
        <BLANKLINE>
        nothing here will be slow or fail
    """
    from xckpt.core.text.shown import readable_bytes

    machine = found.machine
    memory = "" if machine.memory_bytes is None else f", {readable_bytes(machine.memory_bytes)}"
    yield from columns(
        [
            ("system", f"{machine.system}, {machine.processors} processors{memory}"),
            ("python", machine.python),
            *((name, which or "not installed") for name, which in found.packages.items()),
        ]
    )
    for name, value in found.variables.items():
        yield f"{name}={value}"
    yield ""
    if found.local is not None:
        yield from _of_folder(found.local)
    if found.bucket is not None:
        yield from _of_bucket(found.bucket)
    yield from _remarks(found.remarks)


def _of_folder(local: LocalAbilities) -> Iterator[str]:
    from xckpt.core.text.shown import readable_bytes

    able = local.able
    answers = {
        "file locks": able.locks,
        "forces names to disk": able.syncs_folders,
        "tells upper from lower case": able.tells_case,
        "exchanges folders": local.exchanges_folders,
        "several names for a file": local.links_files,
        "syncs many files at once": local.syncs_at_once,
        "local": local.is_local,
    }
    yield f"tried in     {local.folder}"
    for what, is_so in answers.items():
        yield f"  {what:<28} {'yes' if is_so else 'no'}"
    yield f"  {'longest name':<28} {able.longest_name} bytes"
    yield f"  {'a small file to disk':<28} {1e3 * local.sync_seconds:.1f} ms"
    files = "" if local.free_files is None else f", {local.free_files:,} files"
    yield f"  {'free':<28} {readable_bytes(local.free_bytes)}{files}"


def _of_bucket(bucket: BucketAbilities) -> Iterator[str]:
    yield f"asked        {bucket.place}"
    yield f"  permitted: {', '.join(bucket.permitted)}"
    yield f"  answers in {1e3 * bucket.round_trip_seconds:.0f} ms"


def _remarks(remarks: tuple[Remark, ...]) -> Iterator[str]:
    yield ""
    if not remarks:
        yield "nothing here will be slow or fail"
    for remark in remarks:
        yield f"{remark.kind}: {remark.text}"
