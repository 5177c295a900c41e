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
            ("no proxy fence", "ptx::fence_proxy_async();", ""),
            ("full barrier one arrival short", "128 + 1)", "128)"),
            ("empty barrier counts one warpgroup", "(&s.empty[i]), 2)", "(&s.empty[i]), 1)"),
            ("producer parity", "stage.phase ^ 1);", "stage.phase);"),
            ("waits for one group less", "wgmma_wait<1>", "wgmma_wait<2>"),
            ("no wait before the epilogue", "ptx::wgmma_wait<0>();", ""),
            ("no wgmma.fence", "ptx::wgmma_fence();", ""),
            ("A not swizzled", "((chunk ^ (first & 7)) << 4)", "(chunk << 4)"),
            ("expects half of the bytes", "kN * kK * sizeof(bf16)", "kN * kK"),
            ("stmatrix half", "half = lane / 16", "half = lane / 8 % 2"),
            ("one barrier id for both groups", "bar_sync<1 + kGroup, 128>", "bar_sync<1, 128>"),
            ("one row too many", "if (global < rows.end &&", "if (global <= rows.end &&"),
            ("no column bound", "global < rows.end && n * kColumns + piece * 8 < p.H", "global < rows.end"),
            ("too many registers", "setmaxnreg_inc<224>", "setmaxnreg_inc<240>"),
            ("k step of B", "db + kk * kDescriptorK16, (k", "db + 2 * kk * kDescriptorK16, (k"),
            ("no cp.async.wait_all", "ptx::cp_async_wait_all();", ""),
            ("no barrier after init", "__syncthreads();", ""),
            (
                "releases the current stage",
                "(&s.empty[previous]));\n      previous",
                "(&s.empty[stage.index]));\n      previous",
            ),
            ("every thread releases", "if (previous >= 0 && leader)", "if (previous >= 0)"),
            ("row coordinate of w1", "n * (kColumns / 8),", "n * (kColumns / 16),"),
            ("shared memory not aligned", "align_shared(raw)", "raw"),
            ("K tail reads on", "column < p.D ? 16 : 0", "16"),
            ("dropped rows copied", "kept[i] ? bytes : 0", "bytes"),
            ("arrives before the copies", "ptx::cp_async_mbar_arrive_noinc(full)", "ptx::mbar_arrive(full)"),
            ("accumulates into the last tile", "(k | kk) != 0", "true"),
            ("up taken for gate", "pack_bf16(acc[at + 4], acc[at + 5])", "pack_bf16(acc[at], acc[at + 1])"),
            ("padding not zeroed", "store_zeros<kGroup>(p, rows, n);", ""),
            ("expert of w1", "rows.expert);\n      }", "0);\n      }"),
            ("second group reads the first's rows", "+ kGroup * kDescriptor64Rows", ""),
        ],
    ),
    "sm90_down.cu": (
        "test_sm90",
        [
            ("turn parity", "(turns & 1) ^ (kGroup == 0)", "(turns & 1) ^ (kGroup != 0)"),
            (
                "turn never passed on",
                "if (leader) ptx::mbar_arrive(ptx::shared_address(&s.turn[kGroup ^ 1]));",
                "",
            ),
            ("partner's blocks not skipped", "count += steps;", ""),
            (
                "releases the current stage",
                "if (k && leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[stage_of(count - 1)]))",
                "if (k && leader) ptx::mbar_arrive(ptx::shared_address(&s.empty[stage_of(count)]))",
            ),
            ("second half of A", "da + kDescriptor64Rows", "da + kDescriptor64Rows / 2"),
            ("expects B only", "(kM + kN) * kK", "kN * kK"),
            ("producer parity", "parity_of(count) ^ 1", "parity_of(count)"),
            (
                "full barrier not waited for",
                "ptx::mbar_wait(ptx::shared_address(&s.full[stage]), parity_of(count));",
                "",
            ),
            ("stmatrix swizzle", "^ (lane & 7)) << 4)", "^ (lane & 3)) << 4)"),
            (
                "no column bound",
                "if (kHalf * 64 + r < place.num_rows && column < p.D)",
                "if (kHalf * 64 + r < place.num_rows)",
            ),
            ("expert of w2", "n * kN, rows.expert", "n * kN, 0"),
            ("no wait before the epilogue", "ptx::wgmma_wait<0>();", ""),
            ("padding not zeroed", "store_zeros(p, place);", ""),
            ("registers", "setmaxnreg_inc<232>", "setmaxnreg_inc<248>"),
        ],
    ),
    "sm90.cuh": (
        "test_sm90",
        [
            ("stride between groups of rows", "1024ull >> 4 << 32", "512ull >> 4 << 32"),
            ("no swizzle in the descriptor", " | 1ull << 62", ""),
            ("tensor map strides in elements", "shape.strides[i - 1] * sizeof(bf16)", "shape.strides[i - 1]"),
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
            ("first row of a tile", "(before + sum - tiles)) * height", "before) * height"),
            ("start of the first expert", "e == 0 ? 0 : offs[e - 1]", "offs[e ? e - 1 : 0]"),
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
            ("row bound", "if (i >= end) return nullptr;", ""),
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
