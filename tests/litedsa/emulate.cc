// Runs dsa_litedsa's two kernels in the emulator on one case and compares them with float64.
//   emulate FORMAT HEADS SELECTION K LAZY SEED      FORMAT: bf16, fp8, ranges, or union: that kernel alone, with a long span
// Prints the errors; exit code 0: within the limits.
#include <cinttypes>
#include <map>
#include <set>
#include <string>

#include "litedsa_attend.cuh"
#include "litedsa_union.cuh"

using namespace dsa::litedsa;
namespace ptx = dsa::ptx;

namespace {

std::mt19937 rng;
float normal() { return std::normal_distribution<float>()(rng); }
int below(int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }
float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
uint16_t narrow(float f) { return static_cast<uint16_t>(ptx::round_bf16(f)); }

[[noreturn]] void wrong(const std::string& what) {
  std::printf("wrong: %s\n", what.c_str());
  std::exit(1);
}

constexpr uint16_t kPoison = 0x7fc1;

struct Case {
  std::string format, selection;
  int heads, k;
  bool lazy, fp8, ranged;
  int group_size, block_size = 64, span = 1024, blocks, dims, row_bytes;
  std::vector<int> starts, requests;
  std::vector<std::vector<int>> topk;
  int tokens;
  std::vector<int32_t> table;
  std::vector<uint8_t> kv;
  std::vector<std::vector<float>> rows;  // what the cache rows mean
  std::vector<uint16_t> q;               // [tokens, heads, dims + 8]: rows are padded
};

std::vector<int> some(int n, int from, int to) {
  std::vector<int> all;
  for (int i = from; i < to; ++i) all.push_back(i);
  std::shuffle(all.begin(), all.end(), rng);
  all.resize(n);
  return all;
}

std::vector<int> pick(const Case& c, int token, int place, const std::vector<int>& same) {
  const std::string& s = c.selection;
  std::vector<int> ids;
  if (s == "identical") ids = same;
  if (s == "random" || s == "holes") ids = some(c.k, 0, c.span);
  if (s == "disjoint" || s == "shared") ids = some(c.k, 1 + place * c.k, 1 + (place + 1) * c.k);
  if (s == "shared") ids[0] = 0;
  if (s == "single") ids = some(1, 0, c.span);
  if (s == "short") ids = some(1 + token % c.k, 0, 3 * c.k);
  if (s == "last" && place == c.group_size - 1) ids = some(c.k, 0, c.span);
  if (s == "twice") {
    ids = some(c.k, 0, c.span);
    if (token == c.starts[1]) ids[c.k - 1] = ids[0];
  }
  ids.resize(c.k, -1);
  if (s == "holes")
    for (int& id : ids)
      if (below(3) == 0) id = below(2) ? -1 : c.span + below(5000);  // out of range counts as none
  std::shuffle(ids.begin(), ids.end(), rng);
  return ids;
}

void make(Case& c) {
  c.fp8 = c.format == "fp8";
  c.ranged = c.format == "ranges";
  c.group_size = kRows / c.heads;
  c.dims = c.ranged ? 512 : 576;
  c.row_bytes = c.fp8 ? 656 : c.dims * 2;
  // Two requests, each with an uneven last group; the first group starts at token 3.
  c.starts = {3};
  for (int r = 0; r < 2; ++r) {
    c.starts.push_back(c.starts.back() + c.group_size);
    c.starts.push_back(c.starts.back() + (r ? 1 : (c.group_size + 1) / 2));
  }
  c.tokens = c.starts.back() + 2;
  c.requests.assign(c.tokens, 2);
  for (int t = c.starts[2]; t < c.tokens; ++t) c.requests[t] = 1;
  if (c.format == "union") {  // three segments, the last one short, and blocks that no shift divides by
    c.block_size = 48;
    c.span = 2 * kSegment<true> + 5632;
  }
  c.blocks = c.span / c.block_size;
  const int table_blocks = 3 * c.blocks;
  std::vector<int> where = some(table_blocks, 0, table_blocks);
  c.table.assign(where.begin(), where.end());
  const int rows = c.format == "union" ? 0 : table_blocks * c.block_size;
  c.rows.assign(rows, std::vector<float>(c.dims));
  c.kv.assign(static_cast<size_t>(rows) * c.row_bytes + 16, 0);
  for (int r = 0; r < rows; ++r) {
    uint8_t* row = c.kv.data() + static_cast<size_t>(r) * c.row_bytes;
    float scales[4];
    for (float& s : scales) s = 0.01f * std::exp(normal());
    if (c.fp8) std::memcpy(row + 512, scales, 16);
    for (int d = 0; d < c.dims; ++d) {
      if (c.fp8 && d < 512) {
        do row[d] = static_cast<uint8_t>(rng());
        while ((row[d] & 0x7f) == 0x7f);
        c.rows[r][d] = widen(narrow(ptx::e4m3(row[d]) * scales[d / 128]));
      } else {
        const uint16_t bits = narrow(normal());
        std::memcpy(row + (c.fp8 ? 528 + (d - 512) * 2 : d * 2), &bits, 2);
        c.rows[r][d] = widen(bits);
      }
    }
  }
  c.q.resize(static_cast<size_t>(c.tokens) * c.heads * (c.dims + 8));
  for (uint16_t& x : c.q) x = narrow(normal());
  const std::vector<int> same = some(std::min(c.k, c.span), 0, c.span);
  for (int t = 0; t < c.tokens; ++t) {
    int place = 0;
    for (int s : c.starts)
      if (s <= t) place = t - s;
    c.topk.push_back(pick(c, t, place, same));
  }
}

struct Unions {
  int groups, capacity;
  std::vector<int32_t> slots, counts, ranges;
  std::vector<uint64_t> masks;
};

// Without a table a position is its row.
bool plain(const Case& c) { return c.selection == "identical"; }

int row_of(const Case& c, int token, int position) {
  if (plain(c)) return position;
  return c.table[c.requests[token] * c.blocks + position / c.block_size] * c.block_size + position % c.block_size;
}

// The selection of each token as cache rows.
std::vector<int> selected(const Case& c, int token) {
  std::vector<int> rows;
  for (int id : c.topk[token])
    if (id >= 0 && id < c.span) rows.push_back(row_of(c, token, id));
  return rows;
}

// The kernel that dsa_litedsa_union launches.
using UnionKernel = void (*)(UnionParams);
UnionKernel union_of(const Case& c) {
  if (c.span > kSegment<false>) return c.heads == 8 ? union_kernel<8, true> : c.heads == 16 ? union_kernel<4, true> : union_kernel<2, true>;
  return c.heads == 8 ? union_kernel<8, false> : c.heads == 16 ? union_kernel<4, false> : union_kernel<2, false>;
}

Unions run_union(const Case& c, unsigned seed) {
  Unions u;
  u.groups = static_cast<int>(c.starts.size()) - 1;
  u.capacity = (c.group_size * c.k + 63) / 64 * 64;
  u.slots.assign(static_cast<size_t>(u.groups) * u.capacity, -77);
  u.masks.assign(static_cast<size_t>(u.groups) * u.capacity / 64 * c.group_size, 0xabababababababab);
  u.counts.assign(u.groups, -77);
  const int stride = c.k % 4 ? c.k + 3 : c.k + 4;
  std::vector<int32_t> topk(static_cast<size_t>(c.tokens) * stride, 5);
  for (int t = 0; t < c.tokens; ++t) std::copy(c.topk[t].begin(), c.topk[t].end(), topk.begin() + static_cast<size_t>(t) * stride);
  UnionParams p{};
  p.topk = topk.data();
  p.topk_stride = stride;
  p.starts = c.starts.data();
  p.requests = c.requests.data();
  p.table = plain(c) ? nullptr : c.table.data();
  p.table_stride = p.table_blocks = c.blocks;
  p.block_size = p.block_rows = c.block_size;
  p.per_block = ((1ull << 40) + c.block_size - 1) / c.block_size;
  p.slots = u.slots.data();
  p.masks = u.masks.data();
  p.counts = u.counts.data();
  p.k = c.k;
  p.capacity = u.capacity;
  p.span = c.span;
  p.fours = stride % 4 == 0 && c.k % 4 == 0;
  if (union_shared_bytes(c.span, u.capacity) > emulator::kSharedBytes) wrong("union: too much shared memory");
  for (int g = 0; g < u.groups; ++g)
    emulator::run(g, kUnionThreads, c.lazy, seed + g, [&] { union_of(c)(p); });

  for (int g = 0; g < u.groups; ++g) {
    const std::string name = "union of group " + std::to_string(g);
    std::set<int> positions;
    bool twice = false;
    for (int t = c.starts[g]; t < c.starts[g + 1]; ++t) {
      std::set<int> own;
      for (int id : c.topk[t])
        if (id >= 0 && id < c.span) twice |= !own.insert(id).second;
      positions.insert(own.begin(), own.end());
    }
    if (u.counts[g] != (twice ? -1 : static_cast<int>(positions.size()))) wrong(name + ": count " + std::to_string(u.counts[g]));
    if (twice) continue;
    int e = 0;
    for (int position : positions) {
      if (u.slots[static_cast<size_t>(g) * u.capacity + e] != row_of(c, c.starts[g], position)) wrong(name + ": slot " + std::to_string(e));
      for (int t = c.starts[g]; t < c.starts[g + 1]; ++t) {
        const bool want = std::count(c.topk[t].begin(), c.topk[t].end(), position) > 0;
        const uint64_t word = u.masks[(static_cast<size_t>(g) * (u.capacity / 64) + e / 64) * c.group_size + t - c.starts[g]];
        if ((word >> (e % 64) & 1) != want) wrong(name + ": mask of entry " + std::to_string(e));
      }
      ++e;
    }
    for (; e % 64; ++e) {
      if (u.slots[static_cast<size_t>(g) * u.capacity + e] != -1) wrong(name + ": padding");
      for (int q = 0; q < c.group_size; ++q)
        if (u.masks[(static_cast<size_t>(g) * (u.capacity / 64) + e / 64) * c.group_size + q] >> (e % 64) & 1)
          wrong(name + ": mask of the padding");
    }
  }
  return u;
}

// DeepSeek-V4's form: a prefix and a window of each query are ranges of the group's list.
Unions make_ranges(Case& c) {
  Unions u;
  u.groups = static_cast<int>(c.starts.size()) - 1;
  u.capacity = 256;
  u.ranges.assign(static_cast<size_t>(c.tokens) * 3, 0);
  for (int g = 0; g < u.groups; ++g) {
    const int count = g == 2 ? 0 : 100 + below(150);
    const std::vector<int> rows = some(count, 0, static_cast<int>(c.rows.size()));
    u.counts.push_back(count);
    for (int e = 0; e < u.capacity; ++e) u.slots.push_back(e < count ? rows[e] : -1);
    for (int t = c.starts[g]; t < c.starts[g + 1]; ++t) {
      int32_t* r = &u.ranges[static_cast<size_t>(t) * 3];
      r[0] = t % 3 == 0 ? 0 : below(count / 2 + 1);
      r[1] = r[0] + (count > r[0] ? below(count - r[0]) : 0);
      r[2] = t % 4 == 1 ? r[1] : r[1] + below(count - r[1] + 1);
    }
  }
  return u;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  Case c;
  c.format = argv[1];
  c.heads = std::atoi(argv[2]);
  c.selection = argv[3];
  c.k = std::atoi(argv[4]);
  c.lazy = std::atoi(argv[5]);
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[6]));
  rng.seed(seed);
  make(c);
  Unions u = c.ranged ? make_ranges(c) : run_union(c, seed);
  if (c.format == "union") {
    std::printf("ok\n");
    return 0;
  }

  const int heads = c.heads, padded = c.dims + 8;
  std::vector<float> sinks(heads);
  for (float& s : sinks) s = normal() * 3;
  std::vector<uint16_t> out(static_cast<size_t>(c.tokens) * heads * 512, kPoison);
  std::vector<float> lse(static_cast<size_t>(c.tokens) * heads, -1234.5f);
  AttendParams p{};
  const uint8_t* q = reinterpret_cast<const uint8_t*>(c.q.data());
  p.q_nope = q;
  p.q_rope = c.ranged ? nullptr : q + 1024;
  p.nope_token = p.rope_token = static_cast<int64_t>(heads) * padded * 2;
  p.nope_head = p.rope_head = padded * 2;
  p.kv = c.kv.data();
  p.kv_row = c.row_bytes;
  p.starts = c.starts.data();
  p.counts = u.counts.data();
  p.slots = u.slots.data();
  p.masks = c.ranged ? nullptr : u.masks.data();
  p.ranges = c.ranged ? u.ranges.data() : nullptr;
  p.sinks = c.ranged ? sinks.data() : nullptr;
  p.out = reinterpret_cast<uint8_t*>(out.data());
  p.out_token = static_cast<int64_t>(heads) * 1024;
  p.out_head = 1024;
  p.lse = lse.data();
  p.lse_token = heads;
  p.scale = 1.0f / std::sqrt(192.0f);
  p.capacity = u.capacity;
  p.head_shift = heads == 8 ? 3 : heads == 16 ? 4 : 5;
  p.groups = u.groups;
  p.ctas = (u.groups + 1) / 2;
  for (int g = 0; g < p.ctas; ++g)
    emulator::run(g, kAttendThreads, c.lazy, seed + 100 + g, [&] {
      if (c.fp8) attend_kernel<9, true>(p);
      else if (c.ranged) attend_kernel<8, false>(p);
      else attend_kernel<9, false>(p);
    });

  double worst_out = 0, worst_lse = 0;
  for (int t = 0; t < c.tokens; ++t) {
    int group = -1;
    for (int g = 0; g < u.groups; ++g)
      if (c.starts[g] <= t && t < c.starts[g + 1]) group = g;
    for (int h = 0; h < heads; ++h) {
      const uint16_t* o = &out[(static_cast<size_t>(t) * heads + h) * 512];
      const float l = lse[static_cast<size_t>(t) * heads + h];
      const std::string name = "token " + std::to_string(t) + " head " + std::to_string(h);
      if (group < 0) {
        if (l != -1234.5f || std::any_of(o, o + 512, [](uint16_t x) { return x != kPoison; })) wrong(name + ": written outside");
        continue;
      }
      if (u.counts[group] < 0) {
        if (!std::isnan(l) || std::any_of(o, o + 512, [](uint16_t x) { return x != 0x7fff; })) wrong(name + ": was not refused");
        continue;
      }
      std::vector<int> rows;
      if (c.ranged) {
        const int32_t* r = &u.ranges[static_cast<size_t>(t) * 3];
        for (int e = 0; e < u.counts[group]; ++e)
          if (e < r[0] || (e >= r[1] && e < r[2])) rows.push_back(u.slots[static_cast<size_t>(group) * u.capacity + e]);
      } else {
        rows = selected(c, t);
      }
      if (rows.empty()) {
        if (l != -INFINITY || std::any_of(o, o + 512, [](uint16_t x) { return x != 0; })) wrong(name + ": is not empty");
        continue;
      }
      std::vector<double> scores;
      for (int row : rows) {
        double s = 0;
        for (int d = 0; d < c.dims; ++d)
          s += static_cast<double>(widen(c.q[(static_cast<size_t>(t) * heads + h) * padded + d])) * c.rows[row][d];
        scores.push_back(s * p.scale);
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double s : scores) sum += std::exp(s - top);
      const double exact = top + std::log(sum);
      const double total = c.ranged ? sum + std::exp(sinks[h] - top) : sum;
      double off = 0, size = 0;
      for (int d = 0; d < 512; ++d) {
        double want = 0;
        for (size_t i = 0; i < rows.size(); ++i) want += std::exp(scores[i] - top) / total * c.rows[rows[i]][d];
        off += (widen(o[d]) - want) * (widen(o[d]) - want);
        size += want * want;
      }
      const double error = std::sqrt(off / size);
      if (!(error <= 5e-3)) wrong(name + ": output differs by " + std::to_string(error));
      const double error_lse = std::abs(l - exact) / std::max(1.0, std::abs(exact));
      if (!(error_lse <= 1e-5)) wrong(name + ": log-sum-exp differs by " + std::to_string(error_lse));
      worst_out = std::max(worst_out, error);
      worst_lse = std::max(worst_lse, error_lse);
    }
  }
  std::printf("ok: output %.1e, log-sum-exp %.1e\n", worst_out, worst_lse);
  return 0;
}
