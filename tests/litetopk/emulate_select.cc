// Runs the selection of litetopk (litetopk_select.cuh) in litedsa's emulator and compares it with a sort.
//   emulate_select SHAPE N K WARPS SEED    SHAPE: how the scores spread; WARPS: 1 is a list of a scan, 16 the merge of parts, 0 the
//                                          scores of a scan's first tiles
// Exits with 0 if its keys, their order on a second run and its bound are right.
#include <map>
#include <set>
#include <string>

#include "litetopk_select.cuh"

namespace chosen = dsa::select;

namespace {

std::mt19937 rng;
float normal() { return std::normal_distribution<float>()(rng); }

[[noreturn]] void wrong(const std::string& what) {
  std::printf("wrong: %s\n", what.c_str());
  std::exit(1);
}

float score_of(const std::string& shape, int i, int n) {
  if (shape == "iid") return normal();
  if (shape == "heavy") return std::exp(3.0f * normal());
  if (shape == "positive") return 1000.0f + normal();
  if (shape == "equal") return 1.5f;
  if (shape == "coarse") return static_cast<float>(static_cast<int>(rng() % 7));
  if (shape == "rising") return static_cast<float>(i) / n;
  if (shape == "hot") return i == n / 3 ? 1e30f : normal() * 1e-3f;
  if (shape == "infinite") return rng() % 3 ? normal() : rng() % 2 ? INFINITY
                                                                   : -INFINITY;
  if (shape == "tiny") return normal() * 1e-42f;
  if (shape == "holes") return rng() % 2 ? normal() : NAN;  // an empty slot
  wrong("no such shape");
}

constexpr int kSegments = 4, kStride = 64, kFirst = 1000;
struct Result {
  std::vector<uint64_t> keys;
  uint64_t bound = 0;
};
int hist_memory[chosen::kBins];
chosen::Scratch scratch_memory;

template <int kThreads, typename Source>
Result select_once(const Source& source, int k, unsigned seed) {
  Result result;
  result.keys.assign(k, 0);
  emulator::run(0, kThreads, false, seed, [&] {
    const int thread = static_cast<int>(threadIdx.x);
    const auto emit = [&](uint64_t key, int slot) {
      if (slot < 0 || slot >= k || result.keys[slot]) wrong("a slot is written twice or does not exist");
      result.keys[slot] = key;
    };
    const chosen::Boundary b = chosen::find_boundary<kThreads>(source, k, hist_memory, &scratch_memory, thread);
    const uint64_t bound = chosen::take_largest<kThreads>(source, b, hist_memory, &scratch_memory, thread, emit);
    if (thread == 0) result.bound = bound;
  });
  return result;
}

}  // namespace

int main(int, char** argv) {
  const std::string shape = argv[1];
  const int n = std::atoi(argv[2]), k = std::atoi(argv[3]), warps = std::atoi(argv[4]);
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[5]));
  rng.seed(seed);
  // A head of n keys; behind it, with one warp, segments of different lengths.
  alignas(16) static uint64_t list[(1 << 16) + kSegments * kStride];
  int counts[kSegments] = {0, 1, kStride, 17};
  std::vector<uint64_t> all;
  const auto key_at = [&](int i) -> uint64_t {
    const float score = score_of(shape, i, n);
    return std::isnan(score) ? 0 : chosen::make_key(score + 0.0f, i);
  };
  for (int i = 0; i < n; ++i) list[i] = key_at(i);
  all.assign(list, list + n);
  const int behind = (n + 1) / 2 * 2;  // segments begin at a multiple of 16 bytes
  if (warps == 1)
    for (int s = 0; s < kSegments; ++s)
      for (int j = 0; j < counts[s]; ++j) {
        const float score = std::fabs(normal());
        all.push_back(list[behind + s * kStride + j] = chosen::make_key(score, 1 << 17 | s << 8 | j));
      }
  if (warps == 0) {
    if (n % 4) wrong("the scores of tiles are a multiple of 4");
    all.clear();
    float* scores = reinterpret_cast<float*>(list + k + k % 2);
    for (int i = 0; i < n; ++i) {
      scores[i] = score_of(shape, i, n) + 0.0f;
      all.push_back(std::isnan(scores[i]) ? 0 : chosen::make_key(scores[i], kFirst + i));
    }
  }
  all.erase(std::remove(all.begin(), all.end(), 0), all.end());
  std::sort(all.begin(), all.end(), std::greater<uint64_t>());
  const int taken = std::min<int>(k, static_cast<int>(all.size()));

  const chosen::Segments<kSegments> segments{list, n, behind, kStride, counts, 0, 0};
  const chosen::Segments<kSegments> fresh{list, 0, k + k % 2, kStride, nullptr, n, kFirst};
  const chosen::Array array{list, n};
  const auto once = [&](unsigned s) {
    return warps == 0 ? select_once<32>(fresh, k, s) : warps == 1 ? select_once<32>(segments, k, s)
                                                                  : select_once<512>(array, k, s);
  };
  const Result first = once(seed), again = once(seed + 1);
  if (first.keys != again.keys) wrong("another order of threads gave another result");
  std::vector<uint64_t> sorted = first.keys;
  std::sort(sorted.begin(), sorted.end(), std::greater<uint64_t>());
  for (int i = 0; i < k; ++i)
    if (sorted[i] != (i < taken ? all[i] : 0)) wrong("another set");
  for (int i = 0; i < taken; ++i)
    if (!first.keys[i]) wrong("a hole among the taken keys");
  if (taken && first.bound > all[taken - 1]) wrong("the bound refuses a taken key");
  if (static_cast<int>(all.size()) > taken && first.bound <= all[taken]) wrong("the bound lets a refused key in");
  std::printf("ok\n");
  return 0;
}
