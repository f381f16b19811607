#include "input.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "fields.h"
#include "image.h"

namespace tcxl::fuzz {

namespace {

constexpr const char* kModeNames[kNumOpenModes] = {"exact",       "latest", "read-exact",
                                                   "read-latest", "verify", "inspect"};
constexpr const char* kActionNames[kNumActions] = {"set",  "add",  "xor",   "write",
                                                   "copy", "size", "remove"};
constexpr uint8_t kReboot = 1, kBroken = 2, kLate = 128;
constexpr uint32_t kCountMax = 4096;

template <size_t kCount>
uint8_t index_of(const std::string& word, const char* const (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (word == names[i]) return static_cast<uint8_t>(i);
  }
  throw std::runtime_error("unknown word '" + word + "'");
}

uint8_t file_of(const std::string& word) {
  for (size_t i = 0; i < kNumFiles; ++i) {
    if (word == kFileNames[i]) return static_cast<uint8_t>(i);
  }
  throw std::runtime_error("unknown file '" + word + "'");
}

bool is_field(Action action) { return action <= Action::kXor; }

Operation decode_operation(const uint8_t* from) {
  Operation o;
  o.action = static_cast<Action>((from[0] & ~kLate) % kNumActions);
  o.is_late = (from[0] & kLate) != 0;
  o.index = from[2];
  std::memcpy(&o.offset, from + 4, sizeof o.offset);
  std::memcpy(&o.value, from + 8, sizeof o.value);
  const auto targets = static_cast<unsigned>(is_field(o.action)          ? fields().size()
                                             : o.action == Action::kCopy ? kNumFiles * kNumFiles
                                                                         : kNumFiles);
  o.target = static_cast<uint8_t>(from[1] % targets);
  if (o.action == Action::kWrite) o.count = from[2] + from[3] * 256u;
  o.count = std::min(o.count, kCountMax);
  return o;
}

class Words {
 public:
  explicit Words(const std::string& line) : in_(line) {}
  bool next(std::string& word) { return static_cast<bool>(in_ >> word); }
  std::string word() {
    std::string out;
    if (!next(out)) throw std::runtime_error("the line ends too early");
    return out;
  }
  uint64_t number() {
    const std::string out = word();
    size_t used = 0;
    const bool is_negative = out[0] == '-';
    const uint64_t value =
        is_negative ? static_cast<uint64_t>(std::stoll(out, &used, 0)) : std::stoull(out, &used, 0);
    if (used != out.size()) throw std::runtime_error("'" + out + "' is no number");
    return value;
  }

 private:
  std::istringstream in_;
};

uint8_t find_field(const std::string& owner, const std::string& name) {
  const auto all = fields();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].owner == owner && all[i].name == name) return static_cast<uint8_t>(i);
  }
  throw std::runtime_error("there is no field '" + owner + " " + name + "'");
}

Operation parse_operation(const std::string& first, Words& words) {
  Operation o;
  o.is_late = first == "late";
  o.action = static_cast<Action>(index_of(o.is_late ? words.word() : first, kActionNames));
  if (is_field(o.action)) {
    const std::string owner = words.word();
    o.index = static_cast<uint8_t>(words.number());
    o.target = find_field(owner, words.word());
    o.value = words.number();
    return o;
  }
  o.target = file_of(words.word());
  if (o.action == Action::kRemove) return o;
  o.offset = static_cast<uint32_t>(words.number());
  if (o.action == Action::kWrite) {
    o.value = words.number();
    o.count = static_cast<uint32_t>(words.number());
  } else if (o.action == Action::kCopy) {
    if (words.word() != "to") throw std::runtime_error("'to' is missing");
    o.target = static_cast<uint8_t>(o.target + kNumFiles * file_of(words.word()));
    o.value = words.number() & 0xffffffff;
    o.value |= words.number() << 32;
  }
  return o;
}

void print_operation(const Operation& o, std::ostream& out) {
  out << (o.is_late ? "late " : "") << kActionNames[static_cast<size_t>(o.action)] << ' ';
  if (is_field(o.action)) {
    const Field& field = fields()[o.target];
    out << field.owner << ' ' << unsigned{o.index} << ' ' << field.name << " 0x" << std::hex
        << o.value << std::dec << '\n';
    return;
  }
  out << kFileNames[o.target % kNumFiles];
  if (o.action != Action::kRemove) out << ' ' << o.offset;
  if (o.action == Action::kWrite) out << " 0x" << std::hex << o.value << std::dec << ' ' << o.count;
  if (o.action == Action::kCopy)
    out << " to " << kFileNames[o.target / kNumFiles] << ' ' << (o.value & 0xffffffff) << ' '
        << (o.value >> 32);
  out << '\n';
}

}  // namespace

Input decode(std::span<const uint8_t> bytes) {
  Input input;
  if (bytes.size() < kHeadBytesOfInput) return input;
  input.pool = static_cast<uint8_t>(bytes[0] % kNumPools);
  input.mode = static_cast<OpenMode>(bytes[1] % kNumOpenModes);
  input.is_reboot = (bytes[2] & kReboot) != 0;
  input.is_broken = (bytes[2] & kBroken) != 0;
  for (size_t at = kHeadBytesOfInput; at + kOperationBytes <= bytes.size(); at += kOperationBytes) {
    if (input.operations.size() == kOperationsMax) break;
    input.operations.push_back(decode_operation(bytes.data() + at));
  }
  return input;
}

std::vector<uint8_t> encode(const Input& input) {
  std::vector<uint8_t> out = {
      input.pool, static_cast<uint8_t>(input.mode),
      static_cast<uint8_t>((input.is_reboot ? kReboot : 0) | (input.is_broken ? kBroken : 0)), 0};
  for (const Operation& o : input.operations) {
    uint8_t bytes[kOperationBytes] = {
        static_cast<uint8_t>(static_cast<unsigned>(o.action) | (o.is_late ? kLate : 0u)), o.target,
        o.index};
    if (o.action == Action::kWrite) {
      bytes[2] = static_cast<uint8_t>(o.count & 255);
      bytes[3] = static_cast<uint8_t>(o.count >> 8);
    }
    std::memcpy(bytes + 4, &o.offset, sizeof o.offset);
    std::memcpy(bytes + 8, &o.value, sizeof o.value);
    out.insert(out.end(), bytes, bytes + kOperationBytes);
  }
  return out;
}

std::string print(const Input& input) {
  std::ostringstream out;
  out << "pool " << kPoolNames[input.pool] << '\n'
      << "open " << kModeNames[static_cast<size_t>(input.mode)] << '\n'
      << (input.is_reboot ? "reboot\n" : "") << (input.is_broken ? "broken\n" : "");
  for (const Operation& o : input.operations) print_operation(o, out);
  return out.str();
}

Input parse(const std::string& text, std::string& expected) {
  Input input;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    try {
      Words words(line.substr(0, line.find('#')));
      std::string first;
      if (!words.next(first)) continue;
      if (first == "pool") {
        input.pool = index_of(words.word(), kPoolNames);
      } else if (first == "open") {
        input.mode = static_cast<OpenMode>(index_of(words.word(), kModeNames));
      } else if (first == "reboot") {
        input.is_reboot = true;
      } else if (first == "broken") {
        input.is_broken = true;
      } else if (first == "expect") {
        expected = words.word();
      } else {
        input.operations.push_back(parse_operation(first, words));
      }
    } catch (const std::exception& error) {
      throw std::runtime_error("line " + std::to_string(number) + ": " + error.what());
    }
  }
  return input;
}

}  // namespace tcxl::fuzz
