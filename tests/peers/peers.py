#!/usr/bin/env python3
"""Times other implementations of the same job, by the method of fused-kv-bench.

Each is given as the path of an unmodified upstream file, or of a checkout that has it; none of
their code lies here. Needs PyTorch and Triton on a CUDA machine. Writes JSON:

    {"dense": {PEER: {TOKENS: {"median", "min", "max"}}}, "pool": {...}, "errors": {PEER: TEXT}, ...}

in microseconds per call: a CUDA graph of at least 50 calls over rotating buffers that are together
larger than any L2, the median of 15 replays. A peer's result is compared with a plain float32
computation before it is timed; one that fails, or differs, is reported under "errors" and the
others go on.

    peers.py [--sglang PATH] [--flaggems PATH] [--tokenspeed PATH] [--out FILE] [--tokens T,...]
"""

import argparse
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import pathlib
import shlex
import sys
import traceback
import types

import torch

LAYERS, HEADS, DIM, ROTARY = 8, 8, 128, 128
TOKENS = [1, 16, 128, 512, 2048, 8192, 32768]
TABLE_ROWS = 40_960
SLOTS = 65_536
# As in fused-kv-bench.
ROTATE, MAX_SETS, MIN_LAUNCHES, WARM, REPLAYS = 256 << 20, 2048, 50, 3, 15
# Results are compared up to this many tokens.
COMPARE_UP_TO = 2048
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Greatest |out - reference| / |reference|: a few times what rounding to the type gives (a peer may
# also cut FP8 off instead of rounding it).
TOLERANCE = {BF16: 1e-2, FP8: 0.1}

# --- upstream files ----------------------------------------------------------------------------

# What each peer's file is called in its repository.
FILES = {
    "sglang": "fused_kv_materialize.py",
    "flaggems": "fused_norm_rope_stacked.py",
    "tokenspeed": "_dflash_fused_kv.py",
}
# Packages that such a file may import and that need not be installed: what it needs of them is
# Triton itself, decorators, and helpers of parts that are not called here.
STUBBED = ("sglang", "sgl_kernel", "flag_gems", "flaggems_sglang", "tokenspeed")


class Stub:
    """Stands for anything: a decorator (with or without arguments), a function, a constant."""

    def __call__(self, *args, **_):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self):
        return False


class StubModule(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "triton":
            return importlib.import_module("triton")
        if name == "tl":
            return importlib.import_module("triton.language")
        return Stub()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes stub modules for the packages above; asked last, so a real one comes first."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def locate(peer, path):
    """The file itself, from its own path or that of a checkout."""
    path = pathlib.Path(path).expanduser()
    if path.is_file():
        return path.resolve()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or directory")
    # Variants for other vendors lie in folders called after them, deeper in the tree.
    found = [p for p in path.rglob(FILES[peer]) if "backend" not in p.parts]
    found = [p for p in found if "ops" in p.parts] or found
    if not found:
        raise FileNotFoundError(f"{path}: no {FILES[peer]} in it")
    return min(found, key=lambda p: (len(p.parts), str(p))).resolve()


def load(peer, path):
    """Imports an upstream file by its path."""
    spec = importlib.util.spec_from_file_location(f"peer_{peer}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- inputs and the plain computation ----------------------------------------------------------


class Inputs:
    """Sets of kv and outputs for one token count; the small inputs are shared."""

    def __init__(self, tokens):
        def floats(*shape, dtype=BF16):
            # Zeros would be faster than data.
            return torch.empty(shape, dtype=torch.float32, device="cuda").uniform_(-2, 2).to(dtype)

        torch.manual_seed(7)
        self.tokens = tokens
        width = 2 * HEADS * DIM
        step = 2 * tokens * LAYERS * width * BF16.itemsize
        self.sets = max(1, min(MAX_SETS, -(-ROTATE // step)))
        self.launches = max(self.sets, MIN_LAUNCHES)
        self.weight = floats(LAYERS, DIM)
        self.eps = torch.full((LAYERS,), 1e-6, dtype=torch.float32, device="cuda")
        self.table = floats(TABLE_ROWS, ROTARY)
        self.positions = torch.randint(0, TABLE_ROWS, (tokens,), device="cuda")
        self.kv = torch.empty((self.sets, tokens, LAYERS, width), dtype=BF16, device="cuda")
        for index in range(self.sets):
            self.kv[index] = floats(tokens, LAYERS, width)
        # K and V of a set lie one after the other.
        shape = (self.sets, 2, LAYERS, tokens, HEADS, DIM)
        self.out = torch.full(shape, float("nan"), dtype=BF16, device="cuda")
        self.k, self.v = self.out[:, 0], self.out[:, 1]
        # Distinct slots, also from set to set.
        self.slots = torch.randperm(SLOTS, device="cuda")[: self.sets * tokens]
        self.slots = self.slots.view(self.sets, tokens)

    def arguments(self, index):
        """What all the peers take first."""
        return (self.kv[index], self.weight, self.eps, self.table, self.positions)

    def reference(self, index):
        """K and V in float32, [L, T, H, D]."""
        kv = self.kv[index].float()
        k, v = (part.reshape(self.tokens, LAYERS, HEADS, DIM) for part in kv.chunk(2, dim=-1))
        square = k.pow(2).mean(-1, keepdim=True) + self.eps.view(1, LAYERS, 1, 1)
        k = k * square.rsqrt() * self.weight.float().view(1, LAYERS, 1, DIM)
        angle = self.table[self.positions].float().view(self.tokens, 1, 1, ROTARY)
        cos, sin = angle.chunk(2, dim=-1)
        first, second = k[..., : ROTARY // 2], k[..., ROTARY // 2 : ROTARY]
        rotated = (first * cos - second * sin, second * cos + first * sin, k[..., ROTARY:])
        return torch.cat(rotated, dim=-1).transpose(0, 1), v.transpose(0, 1)


class Pool:
    """K and V of each layer, [SLOTS, H, D]; the bytes are kept too, for indexed writes of FP8."""

    def __init__(self, dtype):
        size = HEADS * DIM * dtype.itemsize
        self.dtype = dtype

        def layers():
            memory = [
                torch.zeros((SLOTS, size), dtype=torch.uint8, device="cuda") for _ in range(LAYERS)
            ]
            return [m.view(dtype).view(SLOTS, HEADS, DIM) for m in memory]

        self.k, self.v = layers(), layers()

    def rows(self, slots):
        """The rows of these slots in float32, [L, T, H, D] each."""
        gather = lambda layers: torch.stack(  # noqa: E731
            [layer.view(torch.uint8)[slots].view(self.dtype).float() for layer in layers]
        )
        return gather(self.k), gather(self.v)


def difference(got, expected, dtype):
    """Greatest relative difference of K and of V; an error where it is too much."""
    worst = 0.0
    for name, a, b in zip("KV", got, expected):
        a, b = a.float(), b.float()
        relative = ((a - b).norm() / b.norm()).item()
        # A NaN fails as well.
        if not relative <= TOLERANCE[dtype]:
            raise ValueError(f"{name} differs from the plain computation: {relative:.3g}")
        worst = max(worst, relative)
    return worst


# --- timing ------------------------------------------------------------------------------------


def measure(call, sets, launches):
    """Microseconds per call of `call(set)`, from replays of a graph of `launches` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in range(3):
            call(launch % sets)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(launches):
            call(launch % sets)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for replay in range(WARM + REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM:
            times.append(start.elapsed_time(end) * 1e3 / launches)
    times.sort()
    return {"median": times[len(times) // 2], "min": times[0], "max": times[-1]}


# --- peers -------------------------------------------------------------------------------------


def sglang_call(module, inputs):
    """sglang's workspace kernel, into given outputs."""

    def call(index):
        module._fused_norm_rope_stacked(
            *inputs.arguments(index),
            HEADS,
            DIM,
            ROTARY,
            k_out=inputs.k[index],
            v_out=inputs.v[index],
        )

    return call


def dense_sglang(modules, inputs):
    return sglang_call(modules["sglang"], inputs), lambda: (inputs.k[0], inputs.v[0])


def dense_flaggems(modules, inputs):
    function = modules["flaggems"].fused_norm_rope_stacked
    # It allocates its outputs. They are held until the set's next turn, so that they rotate.
    outputs = [None] * max(inputs.sets, 2)
    turn = 0

    def call(index):
        nonlocal turn
        outputs[turn % len(outputs)] = function(*inputs.arguments(index), HEADS, DIM, ROTARY)
        turn += 1

    return call, lambda: outputs[0]


def dense_copy(_, inputs):
    """A copy of the same bytes: ties these figures to those of fused-kv-bench."""

    def call(index):
        inputs.out[index].view(-1).copy_(inputs.kv[index].view(-1))

    return call, None


def pool_tokenspeed(modules, inputs, pool):
    module = modules["tokenspeed"]
    # It keeps the addresses of a pool by the first of them.
    getattr(module, "_cached_kv_ptrs", {}).clear()
    function = module._fused_norm_rope_stacked_scatter
    scales = {}
    if pool.dtype == FP8 and "inv_k_scales" in inspect.signature(function).parameters:
        one = torch.ones((LAYERS,), dtype=torch.float32, device="cuda")
        scales = {"inv_k_scales": one, "inv_v_scales": one}

    def call(index):
        slots = inputs.slots[index]
        function(
            *inputs.arguments(index), slots, pool.k, pool.v, HEADS, DIM, ROTARY, **scales
        )

    return call


def pool_indexed(modules, inputs, pool):
    """sglang's way: its workspace kernel, then for each layer one indexed write of K and of V."""
    workspace = sglang_call(modules["sglang"], inputs)
    fp8 = pool.dtype == FP8
    # Indexing by tensor is not there for FP8: the bytes are written.
    targets = [
        (k.view(torch.uint8), v.view(torch.uint8)) if fp8 else (k, v)
        for k, v in zip(pool.k, pool.v)
    ]

    def call(index):
        workspace(index)
        slots = inputs.slots[index]
        for layer, (k, v) in enumerate(targets):
            rows = inputs.k[index][layer], inputs.v[index][layer]
            if fp8:
                rows = tuple(part.to(FP8).view(torch.uint8) for part in rows)
            k[slots], v[slots] = rows

    return call


DENSE = [
    ("sglang", "sglang", dense_sglang),
    ("flaggems", "flaggems", dense_flaggems),
    ("torch copy_", None, dense_copy),
]
POOL = [
    ("tokenspeed bf16", "tokenspeed", pool_tokenspeed, BF16),
    ("tokenspeed e4m3fn", "tokenspeed", pool_tokenspeed, FP8),
    ("indexed writes bf16", "sglang", pool_indexed, BF16),
    ("indexed writes e4m3fn", "sglang", pool_indexed, FP8),
]


class Run:
    """The report, and how an entry gets into it."""

    def __init__(self, options):
        self.options = options
        self.modules = {}
        self.report = {
            "kind": "fused-kv-peers",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            # File names tell as much as paths do, elsewhere.
            "command": shlex.join(["peers.py", *(a.rsplit("/", 1)[-1] for a in sys.argv[1:])]),
            "device": None,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": None,
            "cuda": torch.version.cuda,
            "geometry": {"layers": LAYERS, "heads": HEADS, "head_dim": DIM, "rotary_dim": ROTARY},
            "files": {},
            "dense": {},
            "pool": {},
            "compared": {},
            "errors": {},
        }

    def save(self):
        """Writes what there is so far: a later failure loses nothing."""
        if self.options.out:
            text = json.dumps(self.report, indent=2) + "\n"
            pathlib.Path(self.options.out).write_text(text, encoding="utf-8")

    def fail(self, peer, error):
        text = f"{type(error).__name__}: {error}".strip()
        self.report["errors"].setdefault(peer, text)
        print(f"{peer}: {text}", flush=True)
        if self.options.verbose:
            traceback.print_exception(error)
        self.save()

    def load(self, peer, path):
        if path is None:
            return
        try:
            path = locate(peer, path)
            data = path.read_bytes()
            self.report["files"][peer] = {
                "name": path.name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            self.modules[peer] = load(peer, path)
        except Exception as error:  # noqa: BLE001
            self.fail(peer, error)

    def entry(self, group, peer, inputs, prepare, got, dtype):
        """Compares, times and keeps one figure. `prepare` gives the call, `got` its result."""
        try:
            call = prepare()
            call(0)
            torch.cuda.synchronize()
            result = got(call)
            if result is not None and inputs.tokens <= COMPARE_UP_TO:
                worst = difference(result, inputs.reference(0), dtype)
                compared = self.report["compared"]
                compared[peer] = max(compared.get(peer, 0.0), worst)
            del result
            times = measure(call, inputs.sets, inputs.launches)
            self.report[group].setdefault(peer, {})[str(inputs.tokens)] = times
            print(f"{group:<6} {peer:<22} {inputs.tokens:>6} {times['median']:>10.2f} us", flush=True)
        except Exception as error:  # noqa: BLE001
            self.fail(peer, error)
        self.save()

    def dense(self, tokens):
        inputs = Inputs(tokens)
        for peer, module, make in DENSE:
            if module is not None and module not in self.modules:
                continue
            result = []

            def prepare(make=make, result=result):
                call, read = make(self.modules, inputs)
                result.append(read)
                return call

            read = lambda _, result=result: result[0]() if result[0] else None  # noqa: E731
            self.entry("dense", peer, inputs, prepare, read, BF16)

    def pool(self, tokens, pools):
        inputs = Inputs(tokens)
        for peer, module, make, dtype in POOL:
            if module not in self.modules:
                continue
            pool = pools[dtype]
            self.entry(
                "pool",
                peer,
                inputs,
                lambda make=make, pool=pool: make(self.modules, inputs, pool),
                lambda _, pool=pool: pool.rows(inputs.slots[0]),
                dtype,
            )

    def all(self):
        options = self.options
        sys.meta_path.append(StubFinder())
        for peer in FILES:
            self.load(peer, getattr(options, peer))
        try:
            import triton

            self.report["triton"] = triton.__version__
        except ImportError as error:
            self.fail("triton", error)
        if not torch.cuda.is_available():
            self.fail("cuda", RuntimeError("PyTorch sees no CUDA device"))
            return
        self.report["device"] = torch.cuda.get_device_name()
        self.save()
        steps = [(self.dense, tokens, ()) for tokens in options.tokens]
        if self.modules.keys() & {"sglang", "tokenspeed"}:
            pools = {dtype: Pool(dtype) for dtype in (BF16, FP8)}
            steps += [(self.pool, tokens, (pools,)) for tokens in options.tokens]
        for step, tokens, more in steps:
            try:
                step(tokens, *more)
            except Exception as error:  # noqa: BLE001
                self.fail(f"{step.__name__} inputs, {tokens} tokens", error)
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sglang", metavar="PATH", help=f"sglang, or its {FILES['sglang']}")
    parser.add_argument("--flaggems", metavar="PATH", help=f"FlagGems, or its {FILES['flaggems']}")
    parser.add_argument(
        "--tokenspeed", metavar="PATH", help=f"tokenspeed, or its {FILES['tokenspeed']}"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write the figures, as JSON")
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=TOKENS,
        metavar="T,...",
        help="only these token counts",
    )
    parser.add_argument("--verbose", action="store_true", help="print where an error came from")
    run = Run(parser.parse_args())
    run.all()
    run.save()
    # A peer that fails is a finding, not a failure of this script; no figures at all is one.
    return 0 if run.report["dense"] or run.report["pool"] else 1


if __name__ == "__main__":
    sys.exit(main())
