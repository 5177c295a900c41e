// Products with weights in MXFP4, portable and on Hopper, over tails, padding, scales and schedules.
#include "mxfp4_cases.h"

using namespace fmoe_ext;

int main(int argc, char** argv) {
  end_after_cpu_seconds(600);
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const PackedForm y{false, false, true}, dx{true, false, false}, gated_y{false, true, true},
      gated_dx{true, true, false};
  std::vector<int> many_experts(70, 0);  // more than a warp has lanes
  for (const int e : {0, 5, 31, 32, 40, 63, 64, 69}) many_experts[e] = 2 + e;
  for_every_schedule(num_seeds, [&] {
    for (const bool portable : {true, false}) {
      for (const PackedForm& form : {y, dx}) {
        run_mxfp4({{0, 130, 70}, 0, 416, 328, 1}, form,
                  portable);  // more steps than stages; tails; two tiles
        run_mxfp4({{5, 0, 129, 1}, 70, 96, 72, 3}, form, portable, true);  // padding; odd scales
        run_mxfp4({{1}, 0, 32, 8, 5}, form, portable);
        run_mxfp4({{0, 0}, 3, 64, 64, 4}, form, portable);
      }
      for (const PackedForm& form : {gated_y, gated_dx}) run_mxfp4({{9, 70}, 1, 288, 272, 2}, form, portable);
      run_mxfp4({many_experts, 3, 32, 8, 3}, y, portable);
    }
    run_mxfp4({{3, 9}, 0, 64, 13, 1}, y, true);  // widths that Hopper's kernels do not take
    run_mxfp4({{3, 9}, 0, 64, 13, 1}, dx, true);
  });
  return finish();
}
