// Runs the selection of litetopk (litetopk_select.cuh, litetopk_bins.cuh) in litedsa's emulator and compares it with a sort.
//   emulate_select SHAPE N K WARPS SEED [ORIGIN DISTANCE]
// SHAPE: how the scores spread; WARPS: 1 is a list of a scan, 16 the merge of parts, 0 the scores of a scan's first tiles. With ORIGIN
// and DISTANCE (0 0: sampled) it cuts by bins alone and says whether they did. WARPS 2: a row's scan with all its cuts; then N is the
// number of keys.
// Exits with 0 if its keys, their order on a second run, its bound and the gate of a first cut are right.
#include <map>
#include <set>
#include <string>

#include "litetopk_bins.cuh"

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
  if (shape == "falling") return 1.0f - static_cast<float>(i) / n;
  if (shape == "shifting") return normal() - 8.0f * static_cast<float>(i) / n;
  if (shape == "hot") return i == n / 3 ? 1e30f : normal() * 1e-3f;
  if (shape == "infinite") return rng() % 3 ? normal() : rng() % 2 ? INFINITY
                                                                   : -INFINITY;
  if (shape == "tiny") return normal() * 1e-42f;
  if (shape == "holes") return rng() % 2 ? normal() : NAN;  // an empty slot
  wrong("no such shape");
}

constexpr int kSegments = 4, kLists = chosen::kLists, kStride = 64, kFirst = 1000;
alignas(16) uint64_t list[(1 << 16) + kSegments * kStride];
struct Result {
  std::vector<uint64_t> keys;
  uint64_t bound = 0;
  bool found = false;
  float gate = -INFINITY;
};
alignas(16) int hist_memory[chosen::kBins];
chosen::Scratch scratch_memory;

template <int kThreads, typename Source>
Result select_once(const Source& source, int k, unsigned seed) {
  Result result;
  result.keys.assign(k, 0);
  emulator::run(0, kThreads, false, seed, [&] {
    const int thread = static_cast<int>(threadIdx.x);
    const auto emit = [&](bool taken, uint64_t key, int slot) {
      if (!taken) return;
      if (slot < 0 || slot >= k || result.keys[slot]) wrong("a slot is written twice or does not exist");
      result.keys[slot] = key;
    };
    const chosen::Boundary b = chosen::find_boundary<kThreads>(source, k, hist_memory, &scratch_memory, thread);
    const uint64_t bound = chosen::take_largest<kThreads>(source, b, hist_memory, &scratch_memory, thread, emit);
    if (thread == 0) result.bound = bound;
  });
  return result;
}

// The keys by bins, if two choices of them do. `first` chooses.
template <int kThreads, typename Source, typename First>
Result cut_once(const Source& source, int k, unsigned seed, First first) {
  Result result;
  result.keys.assign(k, 0);
  emulator::run(0, kThreads, false, seed, [&] {
    const int thread = static_cast<int>(threadIdx.x);
    chosen::Bins bins = first(thread % 32);
    chosen::Cut cut;
    if (!chosen::try_bins<kThreads>(source, bins, k, hist_memory, thread, cut)) return;
    const auto emit = [&](bool taken, uint64_t key, int slot) {
      if (!taken) return;
      if (slot < 0 || slot >= k || result.keys[slot]) wrong("a slot is written twice or does not exist");
      result.keys[slot] = key;
    };
    const uint64_t bound = chosen::take_cut<kThreads>(source, bins, cut, k, hist_memory, &scratch_memory, thread, emit);
    if (thread == 0) result.bound = bound, result.found = true, result.gate = chosen::floor_of(bins, cut);
  });
  return result;
}

// What a scan does with the scores of one row: the newest are stored, then cut, and of the others those that pass the gate are appended.
void scan_row(const std::string& shape, int n, int k, unsigned seed) {
  constexpr int kFill = 512, kCheck = 64, kSegment = 192;
  std::vector<float> all(n);
  for (int i = 0; i < n; ++i) all[i] = score_of(shape, i, n) + 0.0f;
  std::vector<uint64_t> taken;
  for (unsigned run = 0; run < 2; ++run) {
    std::fill(std::begin(list), std::end(list), 0x5a5a5a5a5a5a5a5aull);
    float* scores = reinterpret_cast<float*>(list + k);
    uint64_t* segments = list + k + kFill / 2;
    const int fill = std::min(n / 64 * 64, kFill), first = n - fill;
    for (int i = 0; i < fill; ++i) scores[i] = all[first + i];
    int counts[kSegments * kLists] = {}, kept = 12345;
    float gate = INFINITY, step = NAN;
    std::vector<uint64_t> out(k);
    const auto cut = [&](bool whole, int next) {
      const bool fresh = whole || kept < 0;
      const chosen::Segments<kSegments> source{list, kept, scores, fresh ? fill : 0, first, segments, kSegment, counts};
      emulator::run(0, 32, false, seed + run, [&] {
        chosen::cut_row(source, whole, next, k, gate, step, kept, hist_memory, &scratch_memory, static_cast<int>(threadIdx.x),
                        [&](bool taken, uint64_t key, int slot) {
                          if (taken) (next < 0 ? out.data() : list)[slot] = key;
                        });
      });
      std::fill(std::begin(counts), std::end(counts), 0);
    };
    cut(true, first ? 0 : -1);
    for (int i = 0; i < first; ++i) {
      const int segment = i / 16 % kSegments, column = i % kLists;
      int& count = counts[segment * kLists + column];
      if (all[i] >= gate) segments[segment * kSegment + kLists * count++ + column] = chosen::make_key(all[i], i);
      if (i + 1 == first)
        cut(false, -1);
      else if (i % kCheck == kCheck - 1 && *std::max_element(std::begin(counts), std::end(counts)) > (kSegment - kCheck / kSegments) / kLists)
        cut(false, i + 1);
    }
    if (run && out != taken) wrong("another order of threads gave another result");
    taken = out;
  }
  std::vector<uint64_t> right;
  for (int i = 0; i < n; ++i)
    if (!std::isnan(all[i])) right.push_back(chosen::rank_of(chosen::make_key(all[i], i)));
  std::sort(right.begin(), right.end(), std::greater<uint64_t>());
  right.resize(std::min<size_t>(k, right.size()));
  taken.resize(right.size());
  for (uint64_t& key : taken) key = chosen::rank_of(key);
  std::sort(taken.begin(), taken.end(), std::greater<uint64_t>());
  if (taken != right) wrong("a scan keeps another set");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string shape = argv[1];
  const int n = std::atoi(argv[2]), k = std::atoi(argv[3]), warps = std::atoi(argv[4]);
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[5]));
  rng.seed(seed);
  if (warps == 2) {
    scan_row(shape, n, k, seed);
    std::printf("ok\n");
    return 0;
  }
  // A head of n keys; behind it, with one warp, segments whose lists are empty, all but one empty, full, and of different lengths.
  int counts[kSegments * kLists] = {};
  counts[kLists + 3] = 1;
  for (int i = 0; i < kLists; ++i) counts[2 * kLists + i] = kStride / kLists, counts[3 * kLists + i] = i * 5 % 9;
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
      for (int j = 0; j < kStride; ++j) {
        const float score = std::fabs(normal());
        list[behind + s * kStride + j] = chosen::make_key(score, 1 << 17 | s << 8 | j);
        if (j / kLists < counts[s * kLists + j % kLists]) all.push_back(list[behind + s * kStride + j]);
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
  for (uint64_t& key : all) {
    if (chosen::key_of(chosen::rank_of(key)) != key) wrong("a rank does not lead back to its key");
    key = chosen::rank_of(key);
  }
  std::sort(all.begin(), all.end(), std::greater<uint64_t>());
  const int taken = std::min<int>(k, static_cast<int>(all.size()));

  const int none[kSegments * kLists] = {};
  const chosen::Segments<kSegments> segments{list, n, nullptr, 0, 0, list + behind, kStride, counts};
  const float* scores = reinterpret_cast<const float*>(list + k + k % 2);
  const chosen::Segments<kSegments> fresh{list, -1, scores, n, kFirst, list, kStride, none};
  const chosen::Array array{list, n};
  const bool by_bins = argc > 7;
  const float origin = by_bins ? std::strtof(argv[6], nullptr) : 0, distance = by_bins ? std::strtof(argv[7], nullptr) : 0;
  const auto once = [&](unsigned s) {
    if (by_bins) {
      const auto given = [&](int) { return chosen::bins_around(origin, distance); };
      const auto sampled = [&](int lane) {
        return warps ? chosen::sampled_bins(list, n, n / k, lane) : chosen::sampled_bins(scores, n, lane);
      };
      if (warps == 16) return distance > 0 ? cut_once<512>(array, k, s, given) : cut_once<512>(array, k, s, sampled);
      if (warps == 1) return cut_once<32>(segments, k, s, given);
      return distance > 0 ? cut_once<32>(fresh, k, s, given) : cut_once<32>(fresh, k, s, sampled);
    }
    return warps == 0 ? select_once<32>(fresh, k, s) : warps == 1 ? select_once<32>(segments, k, s)
                                                                  : select_once<512>(array, k, s);
  };
  const Result first = once(seed), again = once(seed + 1);
  if (first.keys != again.keys) wrong("another order of threads gave another result");
  if (by_bins && !first.found) {
    std::printf("no bins\n");
    return 0;
  }
  if (by_bins) {
    int reach = 0;
    for (uint64_t rank : all) reach += chosen::key_score(chosen::key_of(rank)) >= first.gate;
    if (reach < k || !(chosen::key_score(chosen::key_of(first.bound)) >= first.gate)) wrong("the gate refuses one of the best");
    if (reach > k + chosen::kListMax) wrong("the gate is too low");
  }
  std::vector<uint64_t> sorted = first.keys;
  for (uint64_t& key : sorted)
    if (key) key = chosen::rank_of(key);
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
