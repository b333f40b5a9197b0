"""The compiled CPU kernels against golden results, dense brute force, and themselves on other threads and machines."""

import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfno_dist.geometry import Grid, Neighbourhood
from sfno_dist.ops import compiled

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BUILT = ("plain", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("plain",)


def missing_library() -> str:
    try:
        compiled.description()
    except RuntimeError as error:
        return str(error)
    return ""


def cpu_has(isa: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    needed = {"plain": (), "avx2": (" avx2", " fma"), "avx512": (" avx512f", " avx512bw", " avx512vl", " avx512dq")}
    return all(flag in flags for flag in needed[isa])


def isa_parameters():
    return [pytest.param(isa, marks=() if cpu_has(isa) else pytest.mark.skip(f"no {isa} here")) for isa in BUILT]


@pytest.fixture(scope="module", autouse=True)
def library():
    reason = missing_library()
    if reason:
        pytest.fail(reason)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the operation, dense: every query against every key --------------------------------------------------------


def neighbours(half_widths, key_rows, nlon_out, nlon_in, first_column, columns):
    """Which keys each query attends to, by the integer rule   [Hq, Wq, P] bool, and the row of each key   [P]."""
    ticks = math.lcm(nlon_out, nlon_in)
    points = int(key_rows[:, 1].sum())
    row, tick = torch.zeros(points, dtype=torch.long), torch.zeros(points, dtype=torch.long)
    for h, (first, count, position) in enumerate(key_rows.tolist()):
        row[position : position + count] = h
        tick[position : position + count] = (first + torch.arange(count)) % nlon_in * (ticks // nlon_in)
    query_tick = (first_column + torch.arange(columns)) % nlon_out * (ticks // nlon_out)
    apart = (query_tick[:, None] - tick[None, :]).abs()
    apart = torch.minimum(apart, ticks - apart)
    return apart[None] <= half_widths[:, row][:, None, :], row


def dense(q, k, v, mask, weights):
    """y and lse in plain PyTorch, in the dtype of q; mask [Hq, Wq, P], weights [P]."""
    bias = torch.where(mask, weights.log(), -torch.inf).to(q.dtype)
    scores = torch.einsum("bnrod,bnpd->bnrop", q, k) + bias
    empty = ~mask.any(-1)
    lse = torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), -1)
    p = torch.exp(scores - lse[..., None])
    return torch.einsum("bnrop,bnpd->bnrod", p, v), lse.masked_fill(empty, -torch.inf)


class Case:
    """Random inputs of an ``attend`` call with their dense results."""

    def __init__(self, tables, heads=1, depth=4, value_depth=4, batch=1, scale=1.0, dtype=torch.float32, seed=0):
        half_widths, weights, key_rows, nlon_out, nlon_in, first_column, columns = tables
        self.tables = (half_widths, weights, key_rows, nlon_out, nlon_in, first_column)
        generator = torch.Generator().manual_seed(seed)
        self.mask, row = neighbours(half_widths, key_rows, nlon_out, nlon_in, first_column, columns)
        self.weights, rows, points = weights[row], len(half_widths), len(row)

        def values(*shape, factor=1.0):  # [B, N, points..., D] over channels-last memory
            x = torch.randn(shape[0], *shape[2:-1], shape[1], shape[-1], generator=generator, dtype=torch.float64)
            return (x * factor).to(dtype).movedim(-2, 1)

        self.q = values(batch, heads, rows, columns, depth, factor=scale)
        self.k = values(batch, heads, points, depth)
        self.v = values(batch, heads, points, value_depth)
        self.dy = values(batch, heads, rows, columns, value_depth)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.dlse = torch.randn(batch, heads, rows, columns, generator=generator, dtype=torch.float64).to(wide)

    def run(self, needs=(True, True)):
        """(y, lse, dq, dk, dv) of the compiled kernels."""
        y, lse = compiled.forward(self.q, self.k, self.v, *self.tables)
        return y, lse, *compiled.backward(self.dy, self.dlse, self.q, self.k, self.v, y, lse, *self.tables, *needs)

    def dense(self, dtype):
        """(y, lse, dq, dk, dv) of plain PyTorch in ``dtype`` from the same inputs."""
        q, k, v = (x.to(dtype).clone().requires_grad_() for x in (self.q, self.k, self.v))
        y, lse = dense(q, k, v, self.mask, self.weights)
        finite = self.mask.any(-1).expand(lse.shape)
        loss = (y * self.dy.to(dtype)).sum() + (lse * self.dlse.to(dtype))[finite].sum()
        return tuple(x.detach() for x in (y, lse)) + torch.autograd.grad(loss, (q, k, v))

    def magnitudes(self):
        """What each result's relative rounding error is a multiple of (float64).

        p = w exp(s - lse) errs by as many roundings as the terms of s and |lse| count; dq and dk by as many times more
        as their norms would be larger if no two of their terms cancelled.
        """
        q, k, v, dy, dlse = (x.double() for x in (self.q, self.k, self.v, self.dy, self.dlse))
        scores = torch.einsum("bnrod,bnpd->bnrop", q, k) + torch.where(self.mask, self.weights.log(), -torch.inf)
        p = torch.softmax(scores, -1).nan_to_num()
        dp = torch.einsum("bnrod,bnpd->bnrop", dy.abs(), v.abs())
        ds = p * (dp + (p * dp).sum(-1, keepdim=True) + dlse.abs()[..., None])
        sums = torch.einsum("bnrop,bnpd->bnrod", ds, k.abs()), torch.einsum("bnrop,bnrod->bnpd", ds, q.abs())
        exact = self.dense(torch.float64)
        terms = torch.einsum("bnrod,bnpd->bnrop", q.abs(), k.abs()) + torch.where(
            self.mask, self.weights.log().abs(), 0
        )
        size_s, size_lse = (
            float((x[seen] ** 2).mean().nan_to_num().sqrt())
            for x, seen in ((terms, torch.isfinite(scores)), (exact[1], torch.isfinite(exact[1])))
        )
        exponent = 1.0 + size_s + size_lse
        cancelled = (float(sum_.norm() / x.norm().clamp_min(1e-30)) for sum_, x in zip(sums, exact[2:4], strict=True))
        return {"y": exponent, "lse": 1.0 + size_s / max(size_lse, 1e-30), "dv": exponent} | {
            name: exponent * (1.0 + factor) for name, factor in zip(("dq", "dk"), cancelled, strict=True)
        }


def error(got, exact):
    """Norm of the error relative to the norm of the exact result; infinities must agree."""
    got, exact = got.double(), exact.double()
    assert torch.equal(torch.isinf(got), torch.isinf(exact))
    finite = torch.isfinite(exact)
    assert torch.isfinite(got[finite]).all()
    return float((got - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-30))


def check(case, dtype):
    """The rule of the project: error against float64 at most twice that of plain PyTorch in the same dtype.

    Or within the rounding of the sums themselves: a case of one key has errors of 0 by luck on either side.
    """
    names = ("y", "lse", "dq", "dk", "dv")
    rounding = case.magnitudes()
    for name, got, plain, exact in zip(names, case.run(), case.dense(dtype), case.dense(torch.float64), strict=True):
        assert got.dtype == (case.dlse.dtype if name == "lse" else dtype), name
        assert got.shape == exact.shape, name
        if exact.numel():
            floor = 2.0 * torch.finfo(dtype).eps * rounding[name]
            limit = 2.0 * error(plain, exact) if dtype != torch.float64 else 8.0 * floor
            assert error(got, exact) <= max(limit, floor), name


def whole(grid_in, grid_out, cutoff):
    neighbourhood = Neighbourhood(grid_in, grid_out, cutoff)
    rows = torch.tensor([[0, grid_in.nlon, h * grid_in.nlon] for h in range(grid_in.nlat)])
    weights = torch.from_numpy(grid_in.cell_areas.copy())
    half_widths = torch.from_numpy(neighbourhood.half_widths)
    return half_widths, weights, rows, grid_out.nlon, grid_in.nlon, 0, grid_out.nlon


@st.composite
def random_tables(draw, windows=True):
    """Any half-widths, ratio and weights; with ``windows`` any query columns and ragged key rows that may wrap."""
    nlon_out, nlon_in = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rows_out, rows_in = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ticks = math.lcm(nlon_out, nlon_in)
    widest = int(ticks / 2 * draw(st.sampled_from([0.1, 0.3, 1.0])))  # narrow arcs have kernels of their own
    half_widths = random.integers(-1, widest + 1, (rows_out, rows_in))
    half_widths = np.where(random.random(half_widths.shape) < draw(st.sampled_from([0.1, 0.6, 1.0])), half_widths, -1)
    first, columns, key_first, counts = 0, nlon_out, np.zeros(rows_in, int), np.full(rows_in, nlon_in)
    if windows:
        first, columns = draw(st.integers(-nlon_out, 2 * nlon_out)), draw(st.integers(1, nlon_out))
        key_first, counts = random.integers(0, nlon_in, rows_in), random.integers(0, nlon_in + 1, rows_in)
    key_rows = torch.from_numpy(np.stack([key_first, counts, np.cumsum(counts) - counts], 1))
    weights = torch.from_numpy(random.uniform(0.01, 1.0, rows_in))
    return torch.from_numpy(half_widths.astype(np.int32)), weights, key_rows, nlon_out, nlon_in, first, columns


# --- results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_golden_results_and_gradients(path, dtype):
    golden = np.load(path)
    shape = {side: golden["k" if side == "in" else "q"].shape for side in ("in", "out")}
    grid_in, grid_out = (Grid(str(golden[f"grid_{side}"]), *shape[side][2:]) for side in ("in", "out"))
    tables = whole(grid_in, grid_out, float(golden["theta_cutoff"]))[:-1]

    def split(x, points):  # [B, D, H, W] -> [B, 1, H, W, D] or [B, 1, P, D]
        x = torch.from_numpy(x).to(dtype).unsqueeze(1).movedim(2, -1)
        return x.flatten(2, 3) if points else x

    q, dy = (split(golden[name], False) for name in ("q", "dy"))
    k, v = (split(golden[name], True) for name in ("k", "v"))
    y, lse = compiled.forward(q, k, v, *tables)
    gradients = compiled.backward(dy, None, q, k, v, y, lse, *tables, True, True)
    for name, got in zip(("out", "dq", "dk", "dv"), (y, *gradients), strict=True):
        expected = split(golden[name], name in ("dk", "dv")).double()
        assert error(got, expected) < (2e-6 if dtype == torch.float32 else 1e-9), name


@settings(deadline=None, max_examples=50)
@given(
    random_tables(),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.one_of(st.sampled_from([16, 32, 80]), st.integers(1, 21)),
    st.one_of(st.sampled_from([16, 64]), st.integers(1, 35)),
    st.integers(0, 99),
)
def test_random_windows_equal_brute_force(tables, dtype, heads, depth, value_depth, seed):
    check(Case(tables, heads, depth, value_depth, scale=0.5, dtype=dtype, seed=seed), dtype)


@settings(deadline=None, max_examples=30)
@given(random_tables(windows=False), st.sampled_from(DTYPES), st.sampled_from([8, 16, 32, 64, 72]), st.integers(1, 2))
def test_random_globes_equal_brute_force(tables, dtype, depth, batch):
    check(Case(tables, 2, depth, depth, batch, scale=0.3, dtype=dtype), dtype)


@pytest.mark.parametrize("isa", isa_parameters())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes", [((16, 32), (16, 32)), ((8, 16), (16, 32)), ((16, 32), (8, 16)), ((17, 30), (12, 28))]
)
def test_every_instruction_set_equals_brute_force(shapes, dtype, isa, monkeypatch):
    monkeypatch.setenv(compiled.ISA_VARIABLE, isa)
    assert f"{isa} in use" in compiled.description()
    tables = whole(Grid("equiangular", *shapes[0]), Grid("legendre-gauss", *shapes[1]), 0.5)
    check(Case(tables, 2, 16, 24, 1, scale=0.25, dtype=dtype), dtype)
    check(Case(tables, 1, 7, 3, scale=0.4, dtype=dtype), dtype)


def test_neighbours_are_those_within_the_great_circle_distance():
    grid_in, grid_out, cutoff = Grid("equiangular", 19, 36), Grid("equiangular", 10, 24), 0.4
    tables = whole(grid_in, grid_out, cutoff)

    def unit(grid):
        theta, phi = np.meshgrid(grid.colatitudes, grid.longitudes, indexing="ij")
        return np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], -1)

    a, b = unit(grid_out)[:, :, None, None], unit(grid_in)[None, None]
    distance = 2.0 * np.arcsin(np.minimum(np.linalg.norm(a - b, axis=-1) / 2.0, 1.0))
    case = Case(tables, depth=8, value_depth=8, dtype=torch.float64)
    case.mask = torch.from_numpy(distance <= cutoff * 1.001).flatten(2)
    for got, exact in zip(case.run(), case.dense(torch.float64), strict=True):
        assert error(got, exact) < 1e-13


def test_logits_of_600_stay_finite():
    tables = whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.5)
    case = Case(tables, depth=16, value_depth=16, dtype=torch.float32)
    scores = torch.einsum("bnrod,bnpd->bnrop", case.q, case.k)
    case.q *= 600.0 / scores.abs().max()
    results = case.run()
    for name, got, exact in zip(("y", "lse", "dq", "dk", "dv"), results, case.dense(torch.float64), strict=True):
        assert error(got, exact) < 1e-3, name
    for sign in (1.0, -1.0):  # every logit at once at the extreme
        case.k.copy_(torch.ones_like(case.k))
        case.q.copy_(torch.full_like(case.q, sign * 600.0 / 16))
        assert all(torch.isfinite(x).all() for x in case.run())


def test_queries_without_keys_give_zero_and_pass_no_gradient():
    tables = list(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6))
    tables[0] = tables[0].clone()
    tables[0][2] = -1
    case = Case(tuple(tables), 2, 5, 3)
    y, lse, dq, dk, dv = case.run()
    assert not y[:, :, 2].any() and not dq[:, :, 2].any() and (lse[:, :, 2] == -torch.inf).all()
    assert all(torch.isfinite(x).all() for x in (y, dq, dk, dv))


def test_nan_reaches_the_queries_that_see_it_and_their_gradients():
    case = Case(whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), depth=8, value_depth=8)
    case.k[0, 0, 5 * 24 + 7, 3] = torch.nan
    y, lse, dq, *_ = case.run()
    seen = case.mask[:, :, 5 * 24 + 7]
    assert torch.isnan(lse[0, 0])[seen].all() and not torch.isnan(lse[0, 0])[~seen].any()
    assert torch.isnan(y[0, 0])[seen].all()
    assert torch.isnan(dq[0, 0])[seen].all()


# --- calls -------------------------------------------------------------------------------------------------------


def test_only_the_needed_gradients_are_computed():
    case = Case(whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), 2, 8, 8)
    both = case.run()[2:]
    dq, dk, dv = case.run((True, False))[2:]
    assert dk is None and dv is None and torch.equal(dq, both[0])
    dq, dk, dv = case.run((False, True))[2:]
    assert dq is None and torch.equal(dk, both[1]) and torch.equal(dv, both[2])


def test_any_memory_layout_gives_the_same_bits():
    case = Case(whole(Grid("equiangular", 12, 24), Grid("equiangular", 12, 24), 0.4), 2, 8, 16, 2)
    expected = case.run()
    assert all(x.movedim(1, -2).is_contiguous() for x in (expected[0], *expected[2:]))
    case.q = case.q.contiguous()  # heads before points
    case.k = case.k.mT.contiguous().mT  # channels first
    case.v = torch.cat([case.v, torch.full_like(case.v, torch.nan)], -1)[..., :16]  # a slice of wider memory
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))
    case.dy = torch.ones(1).expand(case.dy.shape)
    broadcast = case.run()
    case.dy = case.dy.contiguous()
    assert all(torch.equal(a, b) for a, b in zip(case.run(), broadcast, strict=True))


def test_batch_0():
    case = Case(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6), 2, 5, 3, batch=0)
    assert [list(x.shape) for x in case.run()] == [
        [0, 2, 6, 12, 3], [0, 2, 6, 12], [0, 2, 6, 12, 5], [0, 2, 72, 5], [0, 2, 72, 3]
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_1_2_and_3_threads(dtype, threads):
    case = Case(whole(Grid("equiangular", 45, 90), Grid("equiangular", 45, 90), 0.2), 2, 32, 32, dtype=dtype)
    results = []
    for count in (1, 2, 3, 3):
        threads(count)
        results.append(case.run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def run_in_child(case, connection):
    connection.send([x.numpy().tobytes() for x in case.run()])


def test_works_in_a_forked_process(threads):
    threads(2)
    case = Case(whole(Grid("equiangular", 45, 90), Grid("equiangular", 45, 90), 0.2), 1, 32, 32)
    expected = [x.numpy().tobytes() for x in case.run()]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_in_child, args=(case, sender))
    child.start()
    assert receiver.poll(60), "the forked process hangs"
    assert receiver.recv() == expected
    child.join(60)
    assert child.exitcode == 0


# --- refusals ----------------------------------------------------------------------------------------------------


def test_missing_library_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setenv(compiled.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(RuntimeError, match="is not a file"):
        compiled._library_path()
    monkeypatch.delenv(compiled.LIBRARY_VARIABLE)
    monkeypatch.setattr(compiled, "LIBRARY_NAME", "no_such_library")
    with pytest.raises(RuntimeError, match=r"pip install \..*apt-get install g\+\+"):
        compiled._library_path()


@pytest.mark.parametrize("isa", ["sse9", *(isa for isa in BUILT if not cpu_has(isa))])
def test_instruction_sets_that_are_missing_are_refused(isa, monkeypatch):
    monkeypatch.setenv(compiled.ISA_VARIABLE, isa)
    case = Case(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6))
    with pytest.raises(RuntimeError, match=isa):
        case.run()
    with pytest.raises(RuntimeError, match=isa):
        compiled.description()


def test_inputs_that_do_not_fit_are_refused():
    case = Case(whole(Grid("equiangular", 6, 12), Grid("equiangular", 6, 12), 0.6))
    with pytest.raises(TypeError, match="int64"):
        compiled.forward(case.q.long(), case.k.long(), case.v.long(), *case.tables)
    with pytest.raises(TypeError, match="one for all"):
        compiled.forward(case.q, case.k.double(), case.v, *case.tables)
    y, lse = compiled.forward(case.q, case.k, case.v, *case.tables)
    with pytest.raises(TypeError, match=r"one for all.* y torch.float32, dy torch.float64"):
        compiled.backward(case.dy.double(), None, case.q, case.k, case.v, y, lse, *case.tables, True, True)
    with pytest.raises(TypeError, match="CPU tensors of one device, got q on cpu and another on meta"):
        compiled.backward(case.dy.to("meta"), None, case.q, case.k, case.v, y, lse, *case.tables, True, True)
    with pytest.raises(RuntimeError, match="key row 5 holds 12 columns"):
        compiled.forward(case.q, case.k[:, :, :-1], case.v[:, :, :-1], *case.tables)


# --- memory errors and undefined behaviour ------------------------------------------------------------------------


def run_sanitized(file, tests, variable, library, asan_options):
    """The ``tests`` of ``file`` in a process with the sanitizers' runtimes, on a library that ``variable`` names."""
    find = [["g++", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    runtime = [subprocess.run(x, capture_output=True, text=True, check=True).stdout.strip() for x in find]
    environment = os.environ | {
        variable: str(library),
        "LD_PRELOAD": ":".join(runtime),
        "ASAN_OPTIONS": asan_options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", tests]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++") or not shutil.which("cmake"), reason="needs g++ and cmake"
)
def test_sanitizers_find_nothing(tmp_path):
    source = Path(__file__).parents[2]
    flags = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    configure = ["cmake", "-S", source, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_COMPILER=g++"]
    configure += ["-DCMAKE_CUDA_COMPILER=OFF"]  # what runs on the CPU is what the sanitizers see
    for command in ([*configure, f"-DCMAKE_CXX_FLAGS={flags}"], ["cmake", "--build", tmp_path, "-j2"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    tests = "random or instruction_set or layout or batch_0 or threads"
    run_sanitized(
        __file__, tests, compiled.LIBRARY_VARIABLE, tmp_path / f"{compiled.LIBRARY_NAME}.so", "detect_leaks=0"
    )
