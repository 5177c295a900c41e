"""Seeds bugs into the kernels, one at a time, and checks that the plain test programs notice.

    python tests/emulator/mutate.py [part of a name ...]

Not part of the default tests: about four seconds a bug. Fails when fewer than 95 % are noticed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import emu_build

CUDA = emu_build.ROOT / "cuda"
SEEDS = "3"
TIMEOUT = 90

# file: (program, [(name, what is there, what it becomes), ...])
MUTATIONS = {
    "sm90_up.cu": (
        "test_sm90",
        [
            (
                "up taken for gate",
                "acc[i * 8 + 4 + lower * 2], acc[i * 8 + 5",
                "acc[i * 8 + lower * 2], acc[i * 8 + 1",
            ),
            ("rows of the second group", "row = tile.row + group * 64,", "row = tile.row,"),
            ("row coordinate of w1", "tile.n * (kColumns / 8)", "tile.n * (kColumns / 16)"),
            ("expert of w1", "tile.expert);\n    });", "0);\n    });"),
            ("padding not zeroed", "store_padding(p, tile, group);", ""),
            ("too many registers", "setmaxnreg_inc<224>", "setmaxnreg_inc<240>"),
            ("full barrier one arrival short", "init(kGatherArrivals, 2)", "init(kGatherArrivals - 1, 2)"),
            ("empty barrier counts one warpgroup", "init(kGatherArrivals, 2)", "init(kGatherArrivals, 1)"),
            ("no barrier after init", "__syncthreads();", ""),
            ("shared memory not aligned", "align_shared(raw)", "raw"),
            ("sigmoid of up", "__expf(-g)", "__expf(-up)"),
        ],
    ),
    "sm90_rows_by_weight.cuh": (
        "test_sm90_backward",
        [
            ("expects B only", "sizeof s.ring.a[0] + sizeof s.ring.b[0]", "sizeof s.ring.b[0]"),
            ("blocks of the weight", "b + n * 128", "b + n * 64"),
            ("column of a block", "tile.n * kN + n, k", "tile.n * kN, k"),
            ("expert of the weight", "k * kBlockColumns, tile.expert", "k * kBlockColumns, 0"),
            (
                "second half stored as the first",
                "store_half(bottom, tile, 64)",
                "store_half(bottom, tile, 0)",
            ),
            ("padding not zeroed", "fmoe_ext::store_zeros(", "(void)("),
            ("registers", "setmaxnreg_inc<232>", "setmaxnreg_inc<248>"),
        ],
    ),
    "sm90_ping_pong.cuh": (
        "test_sm90_backward",
        [
            ("turn parity", "(turns & 1) ^ (group == 0)", "(turns & 1) ^ (group != 0)"),
            (
                "turn never passed on",
                "ptx::mbar_arrive(ptx::shared_address(&s.turn[group ^ 1]));",
                "(void)0;",
            ),
            ("turn passed on by one warp", "&bar), 4);", "&bar), 1);"),
            ("partner's blocks not skipped", "count += steps;", ""),
            (
                "releases the current stage",
                "if (k && leader) s.ring.release(count - 1)",
                "if (k && leader) s.ring.release(count)",
            ),
            ("second half of A", "a + kDescriptor64", "a + kDescriptor64 / 2"),
            ("full barrier not waited for", "s.ring.wait_full(count);", ""),
            ("no proxy fence", "if (kGathered) ptx::fence_proxy_async();", ""),
            ("no wait before the epilogue", "ptx::wgmma_wait<0>();", ""),
            (
                "accumulates into the last tile",
                "ptx::wgmma<T, false, kAlongN>(top, a, b, (k | kk) != 0)",
                "ptx::wgmma<T, false, kAlongN>(top, a, b, true)",
            ),
            ("no product of the second half", "tile.num_rows > 64", "tile.num_rows > 96"),
        ],
    ),
    "sm90.cuh": (
        "test_sm90_backward",
        [
            ("stride between groups of rows", "kNext8Rows = 1024 >> 4", "kNext8Rows = 512 >> 4"),
            ("stride between blocks", "kAlongMN ? 8192 >> 4 : 1", "kAlongMN ? 4096 >> 4 : 1"),
            ("no swizzle in the descriptor", "kSwizzle128 = 1", "kSwizzle128 = 0"),
            ("k step along m or n", "16 * 128 : 32", "8 * 128 : 32"),
            ("k step along k", "16 * 128 : 32", "16 * 128 : 64"),
            ("operands not swizzled", "(((piece ^ row) & 7) << 4)", "((piece & 7) << 4)"),
            ("producer parity", "(count / kStages & 1) ^ 1", "count / kStages & 1"),
            ("no proxy fence", "    ptx::fence_proxy_async();", ""),
            ("waits for one group less", "wgmma_wait<1>", "wgmma_wait<2>"),
            ("no wait before the epilogue", "ptx::wgmma_wait<0>();", ""),
            ("no wgmma.fence", "ptx::wgmma_fence();", ""),
            ("second group reads the first's rows", "+ group * kDescriptor64", ""),
            (
                "releases the current stage",
                "if (k && leader) ring.release(count - 1)",
                "if (k && leader) ring.release(count)",
            ),
            ("every thread releases", "if (k && leader) ring", "if (k) ring"),
            ("idle warpgroup keeps the stages", "ring.release(count + k);", ""),
            ("idle warpgroup forgets the stages", "count += steps;", ""),
            ("K tail reads on", "source[i] && column < width;", "source[i] != nullptr;"),
            ("arrives before the copies", "ptx::cp_async_mbar_arrive_noinc(full)", "ptx::mbar_arrive(full)"),
            ("expects half of the bytes", "(full, sizeof ring.b[0])", "(full, sizeof ring.b[0] / 2)"),
            ("no cp.async.wait_all", "ptx::cp_async_wait_all();", ""),
            (
                "rows of the next tile picked",
                "r < tile.num_rows ? rows.row(tile.row + r)",
                "true ? rows.row(tile.row + 16 * i)",
            ),
            ("height of a group of tiles", "- first, kGroup)", ", kGroup)"),
            ("column of a tile", "in_group / height", "in_group / kGroup"),
            ("second group of row tiles", "(first + in_group % height)", "(in_group % height)"),
            (
                "stmatrix half",
                "tile_offset<64>(row, i + lane / 16)",
                "tile_offset<64>(row, i + lane / 8 % 2)",
            ),
            ("one row too many", "if (row < rows && piece", "if (row <= rows && piece"),
            ("no column bound", "row < rows && piece * 8 < columns", "row < rows"),
            ("tensor map strides in elements", "shape.strides[i - 1] * sizeof(T)", "shape.strides[i - 1]"),
            (
                "float16 encoded as bfloat16's neighbour",
                "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;",
                "CU_TENSOR_MAP_DATA_TYPE_FLOAT32;",
            ),
        ],
    ),
    "sm90_grad_hidden.cu": (
        "test_sm90_backward",
        [
            ("gate loaded for up", "p.H + column, row", "column, row"),
            (
                "h of the first half again",
                "tile.row + half * 64 + warp() * kUnitRows, column",
                "tile.row + warp() * kUnitRows, column",
            ),
            ("slot loaded while it is read", "__syncwarp();\n      if (kHalf == 0", "if (kHalf == 0"),
            ("parity of a slot", "uses & 1", "~uses & 1"),
            ("uses of a slot not counted", "++uses;", ""),
            ("rows that are not there loaded", "lane() == 0 && rows_left(tile, 1) > 0", "lane() == 0"),
            ("barrier of another warp", "[group][slot][warp()]", "[group][slot][0]"),
            ("expects the gate only", "(kGated ? 2 : 1) * kUnitRows", "kUnitRows"),
            ("weight forgotten", "dx = scale[lower] * acc[at]", "dx = acc[at]"),
            ("weight forgotten in scaled_a", "pack<T>(scale[lower] * x.value * u.x", "pack<T>(x.value * u.x"),
            ("weight in the dot product", "dot[lower] += acc[at] *", "dot[lower] += dx *"),
            ("value for slope", "pack<T>(dx * x.slope", "pack<T>(dx * x.value"),
            ("gradient of up times up", "pack<T>(dx * x.value, ", "pack<T>(dx * x.value * u.x, "),
            ("h of dropped rows read", "kept[lower] ? gate[q] : 0", "gate[q]"),
            (
                "scaled_a of dropped rows",
                "scale[lower] = kept[lower] && p.weights",
                "scale[lower] = p.weights",
            ),
            ("dot of two lanes", "sum += __shfl_xor_sync(kFullMask, sum, 2);", ""),
            ("dot of another tile", "tiles_n + tile.n] = sum", "tiles_n] = sum"),
            ("accumulators of the first slot", "(slot * 8 + piece + q / 2)", "(piece + q / 2)"),
            ("columns past H stored", "columns = p.H - column;", "columns = kBlockColumns;"),
            ("second block of w2", "b + n * 128", "b + n * 64"),
            ("expert of w2", "k, tile.expert", "k, 0"),
            ("dy by row", "rows.dy_by_token ? rows.row_idx : nullptr", "nullptr"),
            ("b2 of the first expert", "b2[expert * D + d]", "b2[d]"),
            (
                "padding of up not zeroed",
                "if (kGated) fmoe_ext::store_zeros(dh + p.H",
                "if (false) fmoe_ext::store_zeros(dh + p.H",
            ),
            ("slope of gelu_tanh", "1 + 3 * kCubic", "1 + kCubic"),
            ("dots of the first lane", "sum = warp_sum(sum);", ""),
        ],
    ),
    "sm90_grad_weight.cu": (
        "test_sm90_backward",
        [
            (
                "rows of the next expert by TMA",
                "whole = row + kBlockColumns <= tile.rows.end",
                "whole = true",
            ),
            (
                "rows of the next expert gathered",
                "source[i] = r < end ? rows.row(r) : nullptr",
                "source[i] = rows.row(r)",
            ),
            ("last rows left out", "if (!whole) {", "if (false) {"),
            ("rows of another expert", "num_rows, expert)", "num_rows, expert ^ 1)"),
            ("blocks of the gather", "dst + block * 8192", "dst + block * 4096"),
            ("expects the other operand", "whole ? kPlain *", "whole ? kGathered *"),
            ("columns of the TMA loads", "plain_column + c,", "plain_column,"),
            ("always accumulates", "if (accumulate)", "if (true)"),
            ("never accumulates", "if (accumulate)", "if (false)"),
            ("expert without rows left alone", "if (!p.accumulate) store_zeros(", "if (false) store_zeros("),
            ("sums of an expert without rows cleared", "if (!p.accumulate) store_zeros(", "store_zeros("),
            ("upper row for the lower", "v{acc[piece * 4 + lower * 2]", "v{acc[piece * 4]"),
            ("no column bound", "if (piece * 8 >= columns) continue;", ""),
            ("no row bound", "if (row >= rows) continue;", ""),
            ("first half of the columns again", "first / 8 + i, lower", "i, lower"),
            ("m of the second warpgroup", "m = tile.m + group * 64, rows", "m = tile.m, rows"),
            ("n of a tile", "in_group / height * kN", "in_group / kGroup * kN"),
            ("second group of tiles", "(first + in_group % height) * kM", "in_group % height * kM"),
            (
                "place of an expert",
                "static_cast<int64_t>(tile.expert) * p.M",
                "static_cast<int64_t>(0) * p.M",
            ),
            ("arrives before the copies", "ptx::cp_async_mbar_arrive_noinc(full)", "ptx::mbar_arrive(full)"),
            ("overwrites a stage in use", "s.ring.wait_empty(count);", ""),
            ("wrong operand gathered", "gather_a = !b.index", "gather_a = !a.index"),
        ],
    ),
    "expert_rank.cuh": (
        "test_kernels",
        [
            ("rank counts itself", "(1u << lane) - 1", "(2u << lane) - 1"),
            ("scan not exclusive", "mine[tile] = total + sum - count", "mine[tile] = total + sum"),
            (
                "total from a wrong lane",
                "total += __shfl_sync(kFullMask, sum, 31)",
                "total += __shfl_sync(kFullMask, sum, 30)",
            ),
            ("index not checked above", "e >= 0 && e < num_experts ?", "e >= 0 ?"),
            ("histogram of all warps in one", "int* mine = shared + warp * E;", "int* mine = shared;"),
            ("tile end", "order(p + lane) : 0", "order(p) : 0"),
            ("earlier warps forgotten", "next += count;", ""),
        ],
    ),
    "sort_tokens.cu": (
        "test_kernels",
        [
            ("offs of earlier rounds", "offs[e] = before + sum", "offs[e] = sum"),
            ("tail of row_idx not filled", "row_idx[r] = -1", "row_idx[r] += 0"),
            ("start of an expert", "e ? offs[e - 1] : 0", "e ? offs[e] : 0"),
            (
                "no barrier between rounds",
                "before += round_total;\n    __syncthreads();",
                "before += round_total;",
            ),
        ],
    ),
    "apply_capacity.cu": (
        "test_kernels",
        [("one over capacity", "rank < capacity[e]", "rank <= capacity[e]")],
    ),
    "count_tokens.cu": (
        "test_kernels",
        [
            ("no bound", "if (e < 0 || e >= num_experts) continue;", "if (e < 0) continue;"),
            ("histogram not cleared", "histogram[e] = 0", "histogram[e] += 0"),
            ("step", "i += step", "i += step + 1"),
        ],
    ),
    "permute.cu": (
        "test_kernels",
        [
            (
                "token of a choice",
                "kept ? choice / top_k : 0) * width;\n    for (int64_t i",
                "kept ? choice : 0) * width;\n    for (int64_t i",
            ),
            ("dropped row copied", "kept ? source[i] : V{}", "source[i]"),
            ("alignment ignored", "row_bytes % sizeof(V) || ", ""),
            ("weight forgotten", "sum[i] += w * to_acc", "sum[i] += to_acc"),
            (
                "dropped choice summed",
                "if (row < 0 || row >= num_rows) continue;",
                "if (row >= num_rows) continue;",
            ),
            ("row gradient not scaled", "round_to<T>(w * to_acc(g.v[i]))", "round_to<T>(to_acc(g.v[i]))"),
            ("dot of one lane", "dot = warp_sum(dot);", ""),
        ],
    ),
    "topk_gate.cu": (
        "test_kernels",
        [
            (
                "ties by higher index",
                "other_key == best_key && other < best",
                "other_key == best_key && other > best",
            ),
            ("takes the last one again", "key == last_key_ && i > last_", "key == last_key_ && i >= last_"),
            ("negative keys", "bits ^ ((bits >> (8 * sizeof(Key) - 1)) & kMax)", "bits"),
            ("softmax without the largest", "exp(get(i) - largest)", "exp(get(i))"),
            ("weights of all experts", "p.normalize ? of_chosen : totals", "totals"),
            ("gradient not centred", "w * (g - shared) * slope", "w * g * slope"),
        ],
    ),
    "grouped_rows.cuh": (
        "test_kernels",
        [
            ("first row of a tile", "(index - owner.first_tile) * height", "index * height"),
            ("start of the first expert", "e == 0 ? 0 : offs[e - 1]", "offs[e ? e - 1 : 0]"),
            ("row bound", "if (i >= end) return nullptr;", ""),
            ("tile end", "begin + height < end ? begin + height : end", "begin + height"),
        ],
    ),
    "tile_gemm.cuh": (
        "test_kernels",
        [
            ("no barrier before the product", "__syncthreads();\n    gemm.multiply", "gemm.multiply"),
            (
                "no barrier after the product",
                "gemm.multiply(a_tile, b_tile);\n    __syncthreads();",
                "gemm.multiply(a_tile, b_tile);",
            ),
            ("fragment rows of A", "fa[i][1] = pair(p + 8 * kStride);", "fa[i][1] = pair(p + 4 * kStride);"),
            ("fragment k of B", "fb[j][1] = pair(p + 8);", "fb[j][1] = pair(p);"),
            ("accumulator row", "q / 2 * 8", "q / 2 * 4"),
            ("column bound", "row && first_column + c < source.width ? row", "row ? row"),
            ("transposed store", "tile[(c + j) * kStride + r]", "tile[(c + j) * kStride]"),
        ],
    ),
    "grouped_gemm.cu": (
        "test_kernels",
        [
            ("weight of the first expert", "b.base += rows.expert * weight_size;", ""),
            (
                "rows of the next expert summed",
                "a.end = b.end = rows.end;",
                "a.end = b.end = groups.num_rows;",
            ),
            ("column bound", "if (r >= rows.end || n >= N) return;", "if (r >= rows.end) return;"),
            ("sum lanes", "for (int i = 1; i < kSumLanes", "for (int i = 2; i < kSumLanes"),
            ("padding multiplied", "if (!padding) {", "if (true) {"),
        ],
    ),
}


def dependents(name):
    """The .cu files that hold or include a file."""
    if name.endswith(".cu"):
        return [name]
    found, headers = [], {name}
    for _ in range(3):
        for path in [*CUDA.glob("*.cuh"), *CUDA.glob("*.cu")]:
            if any(f'#include "{header}"' in path.read_text() for header in headers):
                (headers.add if path.suffix == ".cuh" else found.append)(path.name)
    return sorted(set(found))


def run(file, program, old, new):
    """What happened to the program with the bug in it, in one line; None when it passed."""
    flags = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-DFMOE_EMULATOR"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in CUDA.iterdir():
            if path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())
        (folder / file).write_text((CUDA / file).read_text().replace(old, new, 1))
        includes = ["-isystem", str(emu_build.cuda_include()), f"-I{emu_build.HERE}", f"-I{folder}"]
        changed = dependents(file)
        objects = []
        for source in changed:
            objects.append(str(folder / f"{source}.o"))
            command = ["g++", *flags, *includes, "-x", "c++", "-c", str(folder / source), "-o", objects[-1]]
            subprocess.run(command, check=True, capture_output=True)
        plain = emu_build.OUT / "plain"
        names = [f"{name}.cpp.o" for name in [*emu_build.EMULATOR, program]]
        names += [f"{path.name}.o" for path in CUDA.glob("*.cu") if path.name not in changed]
        binary = str(folder / "mutant")
        subprocess.run(["g++", *objects, *(str(plain / name) for name in names), "-o", binary], check=True)
        try:
            result = subprocess.run([binary, SEEDS], capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return "ran for too long"
        if result.returncode == 0:
            return None
        words = (result.stdout + result.stderr).strip().splitlines()
        return words[0][:150] if words else f"exit status {result.returncode}"


def main(wanted):
    caught, total = 0, 0
    for file, (program, mutations) in MUTATIONS.items():
        emu_build.build("plain", program)
        text = (CUDA / file).read_text()
        for name, old, new in mutations:
            label = f"{file}: {name}"
            if wanted and not any(part in label for part in wanted):
                continue
            if old not in text:
                sys.exit(f"{label}: the text to change is not there: {old!r}")
            outcome = run(file, program, old, new)
            total += 1
            caught += outcome is not None
            print(f"{'caught' if outcome else 'MISSED'}  {label}  {outcome or ''}", flush=True)
    print(f"{caught} of {total} caught")
    return 0 if caught >= 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
