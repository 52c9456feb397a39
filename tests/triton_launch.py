"""Triton's own launcher, without a GPU: a training step compiled for one, launched on a driver that looks.

    python tests/triton_launch.py FOLDER      # prints a JSON line for each launch

The interpreter has no launcher and the compiler no arguments: this tests what lies between. FOLDER gets a
stub libcuda that accepts everything and records a launch's parameters, as Triton's C code takes them out of
our nested tuples. A line has the kernel, its grid, and where a parameter is not what was passed.
"""

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

STUB = """
#include <stdint.h>
#include <string.h>
static int expected, launches; static uint64_t seen[256]; static unsigned grid[3];
void expect(int n) { expected = n; }
int launched(void) { return launches; }
uint64_t parameter(int i) { return seen[i]; }
unsigned along(int i) { return grid[i]; }
int cuLaunchKernelEx(const unsigned *config, void *f, void **params, void **extra) {
    launches++;
    memcpy(grid, config, sizeof grid);
    for (int i = 0; i < expected; i++) memcpy(&seen[i], params[i], 8);
    return 0;
}
#define YES(name) int name(void) { return 0; }
#define GIVES(name, type, value) int name(type *p) { *p = (type)value; return 0; }
YES(cuInit) YES(cuCtxSetCurrent) YES(cuFuncSetAttribute) YES(cuFuncSetCacheConfig) YES(cuModuleUnload)
YES(cuOccupancyMaxActiveClusters) YES(cuCtxGetLimit) YES(cuCtxSetLimit) YES(cuTensorMapEncodeTiled)
GIVES(cuDriverGetVersion, int, 12080) GIVES(cuDeviceGetCount, int, 1) GIVES(cuCtxGetDevice, int, 0)
GIVES(cuDeviceGet, int, 0) GIVES(cuCtxGetCurrent, void *, 1) GIVES(cuDevicePrimaryCtxRetain, void *, 1)
GIVES(cuModuleLoadData, void *, 2) GIVES(cuModuleGetFunction, void *, 3)
int cuGetErrorString(int e, const char **text) { *text = "none"; return 0; }
int cuStreamIsCapturing(void *stream, int *found) { *found = 0; return 0; }
int cuDeviceGetAttribute(int *p, int what, int device) { *p = what == 97 ? 166912 : 108; return 0; }
int cuFuncGetAttribute(int *p, int what, void *f) { *p = what == 0 ? 1024 : 0; return 0; }
int cuPointerGetAttribute(void *p, int what, unsigned long long pointer) {
    memcpy(p, &pointer, 8);
    return 0;
}
"""


def flat(arguments):
    for one in arguments:
        yield from flat(one) if isinstance(one, tuple) else (one,)


def passed(arguments) -> list[tuple[int, int]]:
    """What a kernel must receive, as numbers and their bytes; None and the integer 1 are compiled in."""
    found = []
    for one in flat(arguments):
        if hasattr(one, "data_ptr"):
            found.append((one.data_ptr(), 8))
        elif isinstance(one, float):
            found.append((struct.unpack("I", struct.pack("f", one))[0], 4))
        elif one is not None and one != 1:
            found.append((one, 4 if one < 2**31 else 8))
    return found


def main(folder: Path) -> None:
    (folder / "stub.c").write_text(STUB)
    file = folder / "libcuda.so.1"
    build = ["cc", "-shared", "-fPIC", "-w", "-o", str(file), str(folder / "stub.c")]
    subprocess.run(build, check=True)
    (folder / "libcuda.so").symlink_to(file)
    lib = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    lib.parameter.restype = ctypes.c_uint64

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver

    from cosformer.ops.call import Call, Inputs, Upstream
    from cosformer.ops.triton import device, run

    class Watched:
        def __init__(self):
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

        def get_current_target(self):
            return GPUTarget("cuda", 80, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    def launch(kernel, grid, *arguments, **options):
        ptx = kernel.warmup(*arguments, grid=grid, **options).asm["ptx"]
        count = len(re.findall(r"\.param ", ptx.partition(".entry")[2].partition(")")[0]))
        wanted, before = passed(arguments[:-1]), lib.launched()
        lib.expect(count)
        kernel[grid](*arguments, **options)
        seen = [lib.parameter(i) for i in range(count)]
        wrong = [
            i for i, (value, size) in enumerate(wanted) if i >= count or (seen[i] ^ value) & (256**size - 1)
        ]
        said = {"kernel": kernel.__name__, "launches": lib.launched() - before, "wrong": wrong}
        said |= {"grid": [lib.along(i) for i in range(3)], "asked": [*grid, 1, 1][:3]}
        # Triton adds two pointers of its own
        print(json.dumps(said | {"parameters": count, "passed": len(wanted) + 2}), flush=True)

    driver.set_active(Watched())
    device.described = lambda _: ("watched", 166912)
    run._launch = launch
    x = torch.empty(1, 256, 4, 32, dtype=torch.bfloat16).transpose(1, 2)
    rates, mask, cu = torch.empty(1, 4, 256), torch.ones(1, 256, dtype=torch.bool), torch.tensor([0, 99, 256])
    inputs, call = Inputs(x, x[:, ::2], x[:, ::2], rates, mask, cu), Call((2048.0,), causal=True, relu=True)
    y = run.forward(inputs, call)
    run.backward(Upstream(x, None), inputs, y, call)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[1]
    # The driver's module is linked to the stub.
    os.environ["TRITON_CACHE_DIR"] = str(Path(sys.argv[1], "cache"))
    main(Path(sys.argv[1]))
