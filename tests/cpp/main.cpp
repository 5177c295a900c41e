// run_parity FOLDER CASE...: runs the cases of parity.cpp. Without arguments: the page's program.
#include <cstdio>
#include <exception>
#include <string>

void first_program();
void run_case(const std::string& folder, const std::string& name, const std::string& group_name);

int main(int argc, char** argv) {
  try {
    if (argc == 1) first_program();
    for (int i = 2; i < argc; ++i) run_case(argv[1], argv[i], "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
