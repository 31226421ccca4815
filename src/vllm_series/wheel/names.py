"""Wheel file names, the versions in them, and the build tag that marks a wheel without kernels."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from vllm_series.errors import UsageError

#: Build tag of a wheel without compiled kernels. PEP 427 wants a leading digit.
NO_KERNELS = "0nokernels"
#: Build tag, or end of it, of a wheel whose DeepGEMM is the series' own.
DEEPGEMM = "deepgemm"


@dataclass(frozen=True)
class WheelName:
    """The parts of ``name-version[-build]-python-abi-platform.whl``."""

    name: str
    version: str
    build: str  # '' if there is none
    tags: str  # python-abi-platform, as written

    @classmethod
    def parse(cls, filename: str) -> WheelName:
        """Split a file name.

        Raises:
            UsageError: it is not a wheel's name.
        """
        try:
            parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            raise UsageError(f"{filename!r} is not a wheel's file name: {error}") from error
        parts = filename.removesuffix(".whl").split("-")
        build = parts[2] if len(parts) == 6 else ""
        return cls(parts[0], parts[1], build, "-".join(parts[-3:]))

    def __str__(self) -> str:
        build = [self.build] if self.build else []
        return "-".join([self.name, self.version, *build, self.tags]) + ".whl"

    def ours(self, version: str, *, kernels: bool, deepgemm: bool = False) -> WheelName:
        """The name of the repacked wheel: same tags, our version, a build tag for what it lacks or adds."""
        build = "" if kernels else NO_KERNELS
        if deepgemm:
            build = f"{build}_{DEEPGEMM}" if build else f"1{DEEPGEMM}"
        return WheelName(self.name, version, build, self.tags)

    @property
    def has_kernels(self) -> bool:
        return not self.build.startswith(NO_KERNELS)

    @property
    def has_deepgemm(self) -> bool:
        return self.build.endswith(DEEPGEMM)

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    @property
    def expanded_tags(self) -> list[str]:
        """Each single tag that the compressed tag set stands for, sorted, as WHEEL lists them."""
        python, abi, platform = (part.split(".") for part in self.tags.split("-"))
        return sorted(f"{p}-{a}-{f}" for p in python for a in abi for f in platform)
