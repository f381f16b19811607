// Replays attack files without a fuzzer: each must end as its line "expect" says.
//   replay_corpus FILE|FOLDER ...          check
//   replay_corpus --encode FOLDER FILE|FOLDER ...   also write what the fuzzer starts from
//   replay_corpus --print FILE             a finding of the fuzzer as text
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness.h"

namespace {

using namespace tcxl::fuzz;
namespace fs = std::filesystem;

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read '" + path.string() + "'");
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::vector<fs::path> find_attacks(const fs::path& path) {
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".attack") found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

bool replay(Harness& harness, const fs::path& path, const std::string& encoded_folder) {
  std::string expected;
  const Input input = parse(read_all(path), expected);
  if (!encoded_folder.empty()) {
    const std::vector<uint8_t> bytes = encode(input);
    std::ofstream out(fs::path(encoded_folder) / path.stem(), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
  }
  std::printf("%s: ", path.filename().c_str());
  std::fflush(stdout);  // should this one end the process
  const Outcome outcome = harness.run(input);
  const bool is_right = outcome.result == expected;
  std::printf("%s%s\n", outcome.result.c_str(),
              is_right ? "" : (", expected " + expected + "\n" + outcome.message).c_str());
  return is_right;
}

int run(const std::vector<std::string>& arguments) {
  std::vector<std::string> paths = arguments;
  if (paths.size() == 2 && paths[0] == "--print") {
    const std::string bytes = read_all(paths[1]);
    std::fputs(
        print(decode({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()})).c_str(),
        stdout);
    return 0;
  }
  std::string encoded_folder;
  if (paths.size() > 2 && paths[0] == "--encode") {
    encoded_folder = paths[1];
    fs::create_directories(encoded_folder);
    paths.erase(paths.begin(), paths.begin() + 2);
  }
  Harness harness;
  int wrong = 0, all = 0;
  for (const std::string& path : paths) {
    for (const fs::path& attack : find_attacks(path)) {
      ++all;
      if (!replay(harness, attack, encoded_folder)) ++wrong;
    }
  }
  std::printf("%d attacks, %d ended otherwise than expected\n", all, wrong);
  return all > 0 && wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replay_corpus: %s\n", error.what());
    return 1;
  }
}
