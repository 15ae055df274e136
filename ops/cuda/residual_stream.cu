// The residual stream between two sublayers: dropout of an update, residual sum, weighted sum over depth and layer norm
// in one pass over memory, and its gradients. Compiled at run time by ops/residual_cuda.py, which defines WIDTH
// (features of a token, a multiple of 128), SUBLAYERS, GROUP and THREADS and documents the arguments.
//
// Sums over depth come in groups: while the states are read for one sum, those of the next GROUP - 1 are begun ("ahead"),
// so that each state is read once a group rather than once a sum, for the price of writing and reading these parts.
//
// A warp owns a token. Sums over depth are kept in registers, in float32, whatever the precision of what is read.
// No atomics: the same input gives the same bits.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int VECTOR = WIDTH % 256 == 0 ? 8 : 4;  // features that a lane reads at once
constexpr int CHUNKS = WIDTH / (32 * VECTOR);
constexpr int ELEMENTS = CHUNKS * VECTOR;         // features of a lane
constexpr int WORDS = VECTOR / 2;
constexpr int AHEAD = ELEMENTS <= 16 ? 8 : ELEMENTS <= 32 ? 4 : 2;  // states whose loads are in flight together
constexpr int FEW = ELEMENTS * GROUP <= 96 ? 4 : 2;                   // the same where GROUP sums are in registers
constexpr int MAX_STATES = 64;
constexpr int MAX_GROUP = 4;
// For the products of all gradients with all states: tiles of 16 gradients by 8 states.
constexpr int ROW_TILES = (SUBLAYERS + 15) / 16;
constexpr int COLUMN_TILES = (SUBLAYERS + 8) / 8;

typedef unsigned short bf16;  // its bits

struct Params {
  const float* x;           // [tokens, WIDTH] the stream, or the gradient of what came out of it
  const bf16* update;       // [tokens, WIDTH] what is added, or null
  const i64* tokens;        // [tokens] dropout's states, or null where nothing is dropped
  const int* columns;       // [>= WIDTH] dropout's column keys
  const float* alphas;      // [n (n + 3) / 2] all weights over depth, those of sublayer k from k (k + 3) / 2 on; or null
  bf16* state;              // [tokens, WIDTH] the new state; backward: the whole gradient of what came out
  float* out;               // [tokens, WIDTH] the new stream; backward: the gradient of x; or null
  bf16* normalised;         // [tokens, WIDTH] layer norm of `out`, or null; backward: read
  float* deviation;         // [tokens] 1 / standard deviation of `out`; backward: read
  const bf16* dnormalised;  // [tokens, WIDTH] or null
  bf16* dupdate;            // [tokens, WIDTH] or null
  float* products;          // [warps, 16 ROW_TILES, 8 COLUMN_TILES] partial sums of <gradient, state>
  const bf16* states[MAX_STATES];     // [tokens, WIDTH] each: those to be read; for the products, all
  const bf16* gradients[MAX_STATES];
  const float* begun;       // [tokens, WIDTH] part of the sum over depth, or null
  float* ahead[MAX_GROUP - 1];        // [tokens, WIDTH] parts of the sums to come
  i64 n_tokens;
  int sublayer;             // k; -1 for the embeddings
  int first;                // number of states[0]; backward: of gradients[0]
  int count;                // states or gradients to be read
  int n_ahead;
  int site;
  int threshold;            // keep where hash >= threshold
  float keep_scale;
  float eps;
};

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

struct Words {
  u32 word[WORDS];
};

// Volatile, so that the compiler does not save registers by waiting for one load before it begins the next.
__device__ __forceinline__ Words load(const bf16* place) {
  Words w;
  if constexpr (VECTOR == 8)
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3]) : "l"(place));
  else
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(w.word[0]), "=r"(w.word[1]) : "l"(place));
  return w;
}

__device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }

// First feature of a lane's chunk in a tensor [tokens, WIDTH].
__device__ __forceinline__ i64 place(i64 token, int chunk, int lane) {
  return token * WIDTH + (chunk * 32 + lane) * VECTOR;
}

__device__ __forceinline__ void load_row(const bf16* from, i64 token, int lane, float (&row)[ELEMENTS]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const Words words = load(from + place(token, c, lane));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      row[c * VECTOR + 2 * i] = low(words.word[i]);
      row[c * VECTOR + 2 * i + 1] = high(words.word[i]);
    }
  }
}

__device__ __forceinline__ void load_row(const float* from, i64 token, int lane, float (&row)[ELEMENTS]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(from + place(token, c, lane) + i));
      float* to = row + c * VECTOR + i;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
}

__device__ __forceinline__ void store_row(bf16* to, i64 token, int lane, const float (&row)[ELEMENTS]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    u32 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = pack(row[c * VECTOR + 2 * i], row[c * VECTOR + 2 * i + 1]);
    bf16* target = to + place(token, c, lane);
    if constexpr (VECTOR == 8)
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    else
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  }
}

__device__ __forceinline__ void store_row(float* to, i64 token, int lane, const float (&row)[ELEMENTS]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      const float* from = row + c * VECTOR + i;
      *reinterpret_cast<float4*>(to + place(token, c, lane) + i) = make_float4(from[0], from[1], from[2], from[3]);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
  return x;
}

// ops/dropout.py's rule for one token at one site.
__device__ __forceinline__ void drop(const Params& p, i64 token, int lane, float (&row)[ELEMENTS]) {
  u64 z = (u64)p.tokens[token] ^ ((u64)p.site << 16);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  const u32 key = (u32)((z ^ (z >> 31)) >> 32);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      const int4 columns = __ldg(reinterpret_cast<const int4*>(p.columns + (c * 32 + lane) * VECTOR + i));
      const u32 column[4] = {(u32)columns.x, (u32)columns.y, (u32)columns.z, (u32)columns.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 hash = (key ^ column[j]) * 0x7FEB352Du;
        hash = (hash ^ (hash >> 15)) * 0x846CA68Bu;
        float& value = row[c * VECTOR + i + j];
        value = (int)hash >= p.threshold ? value * p.keep_scale : 0.0f;
      }
    }
}

__device__ __forceinline__ int first_alpha(int sublayer) { return sublayer * (sublayer + 3) / 2; }

// sums[s] += weight(s, m) * rows[m] for m < count
template <int SUMS, int IN_FLIGHT, typename Weight>
__device__ __forceinline__ void add_weighted(
    const bf16* const (&rows)[MAX_STATES], int count, Weight weight, i64 token, int lane, float (&sums)[SUMS][ELEMENTS]) {
  for (int first = 0; first < count; first += IN_FLIGHT) {
    Words words[IN_FLIGHT][CHUNKS];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const bf16* row = rows[min(first + i, count - 1)];  // beyond the end, once more the last one, times 0
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) words[i][c] = load(row + place(token, c, lane));
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
#pragma unroll
      for (int s = 0; s < SUMS; ++s) {
        const float w = first + i < count ? weight(s, first + i) : 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
          for (int j = 0; j < WORDS; ++j) {
            sums[s][c * VECTOR + 2 * j] += w * low(words[i][c].word[j]);
            sums[s][c * VECTOR + 2 * j + 1] += w * high(words[i][c].word[j]);
          }
      }
  }
}

// The sum over depth that `own` ends, in its place, and parts of those to come: weight(s, -1) is that of `own`.
template <int SUMS, typename Weight>
__device__ __forceinline__ void sum_over_depth(
    const Params& p, const bf16* const (&rows)[MAX_STATES], Weight weight, i64 token, int lane, float (&own)[ELEMENTS]) {
  float sums[SUMS][ELEMENTS];
  if (p.begun) {
    load_row(p.begun, token, lane, sums[0]);
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sums[0][i] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < SUMS; ++s) {
    const float w = s <= p.n_ahead ? weight(s, -1) : 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sums[s][i] = s ? w * own[i] : sums[0][i] + w * own[i];
  }
  const auto weight_or_none = [&](int s, int m) { return s <= p.n_ahead ? weight(s, m) : 0.0f; };
  add_weighted<SUMS, SUMS == 1 ? AHEAD : FEW>(rows, p.count, weight_or_none, token, lane, sums);
#pragma unroll
  for (int s = 1; s < SUMS; ++s)
    if (s <= p.n_ahead) store_row(p.ahead[s - 1], token, lane, sums[s]);
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) own[i] = sums[0][i];
}

// state = x + dropout(update),  out = alpha[k] state + sum of alpha[m] states[m],  normalised = layer_norm(out)
template <int SUMS>
__device__ __forceinline__ void forward(const Params& p) {
  const i64 token = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= p.n_tokens) return;
  float row[ELEMENTS];
  load_row(p.x, token, lane, row);
  if (p.update) {
    float update[ELEMENTS];
    load_row(p.update, token, lane, update);
    if (p.tokens) drop(p, token, lane, update);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[i] += update[i];
  }
  if (p.state) store_row(p.state, token, lane, row);
  if (p.alphas && p.sublayer >= 0) {
    const auto weight = [&](int s, int m) {
      return __ldg(p.alphas + first_alpha(p.sublayer + s) + (m < 0 ? p.sublayer + 1 : p.first + m));
    };
    sum_over_depth<SUMS>(p, p.states, weight, token, lane, row);
  }
  if (p.out) store_row(p.out, token, lane, row);
  if (p.normalised) {
    float mean = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) mean += row[i];
    mean = warp_sum(mean) * (1.0f / WIDTH);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[i] -= mean, square += row[i] * row[i];
    const float deviation = rsqrtf(warp_sum(square) * (1.0f / WIDTH) + p.eps);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[i] *= deviation;
    store_row(p.normalised, token, lane, row);
    if (lane == 0) p.deviation[token] = deviation;
  }
}

// The gradient of `out` is that of its two uses; that of `state` is what all averages over depth from this one on give.
template <int SUMS>
__device__ __forceinline__ void backward(const Params& p) {
  const i64 token = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= p.n_tokens) return;
  float row[ELEMENTS];
  if (p.x) {
    load_row(p.x, token, lane, row);
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[i] = 0.0f;
  }
  if (p.dnormalised) {
    float gradient[ELEMENTS], normalised[ELEMENTS];
    load_row(p.dnormalised, token, lane, gradient);
    load_row(p.normalised, token, lane, normalised);
    float mean = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) mean += gradient[i], product += gradient[i] * normalised[i];
    mean = warp_sum(mean) * (1.0f / WIDTH);
    product = warp_sum(product) * (1.0f / WIDTH);
    const float deviation = p.deviation[token];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) row[i] += deviation * (gradient[i] - mean - normalised[i] * product);
  }
  if (p.state) store_row(p.state, token, lane, row);
  if (p.alphas) {
    const auto weight = [&](int s, int m) {
      if (m < 0 && p.sublayer < 0) return 1.0f;  // the embeddings are the stream's first value as well
      return __ldg(p.alphas + first_alpha(m < 0 ? p.sublayer : p.first + m) + p.sublayer + 1 - s);
    };
    sum_over_depth<SUMS>(p, p.gradients, weight, token, lane, row);
  }
  if (p.out) store_row(p.out, token, lane, row);
  if (p.dupdate) {
    if (p.tokens) drop(p, token, lane, row);
    store_row(p.dupdate, token, lane, row);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) residual_forward(const __grid_constant__ Params p) {
  forward<1>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) residual_forward_ahead(const __grid_constant__ Params p) {
  forward<GROUP>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) residual_backward(const __grid_constant__ Params p) {
  backward<1>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) residual_backward_ahead(const __grid_constant__ Params p) {
  backward<GROUP>(p);
}

// products[warp, k, m] = <gradients[k], states[m]> over the warp's share of elements. Both operands of mma.m16n8k16 are
// loaded as they lie: the order of elements along the sum is the same in both, and otherwise does not matter.
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(256) residual_products(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const i64 warp = (i64)blockIdx.x * 8 + threadIdx.x / 32, warps = (i64)gridDim.x * 8;
  const bf16 *rows[2 * ROW_TILES], *columns[COLUMN_TILES];
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) {
    const int number = group + 8 * i;
    rows[i] = number < SUBLAYERS ? p.gradients[number] + quarter * 8 : nullptr;
  }
#pragma unroll
  for (int i = 0; i < COLUMN_TILES; ++i) {
    const int number = group + 8 * i;
    columns[i] = number <= SUBLAYERS ? p.states[number] + quarter * 8 : nullptr;
  }
  float sums[ROW_TILES][COLUMN_TILES][4] = {};
  const i64 steps = p.n_tokens * (WIDTH / 64);
  for (i64 step = warp; step < steps; step += warps) {
    uint4 a[2][2 * ROW_TILES], b[2][COLUMN_TILES];  // two times 32 elements of each row
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 element = step * 64 + half * 32;
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i)
        a[half][i] = rows[i] ? __ldg(reinterpret_cast<const uint4*>(rows[i] + element)) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < COLUMN_TILES; ++i)
        b[half][i] = columns[i] ? __ldg(reinterpret_cast<const uint4*>(columns[i] + element)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
          const uint4 top = a[half][2 * i], bottom = a[half][2 * i + 1], column = b[half][j];
          multiply(sums[i][j], top.x, bottom.x, top.y, bottom.y, column.x, column.y);
          multiply(sums[i][j], top.z, bottom.z, top.w, bottom.w, column.z, column.w);
        }
  }
  float* out = p.products + warp * (16 * ROW_TILES * 8 * COLUMN_TILES);
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      float* corner = out + (16 * i + group) * (8 * COLUMN_TILES) + 8 * j + 2 * quarter;
      corner[0] = sums[i][j][0], corner[1] = sums[i][j][1];
      corner += 8 * 8 * COLUMN_TILES;
      corner[0] = sums[i][j][2], corner[1] = sums[i][j][3];
    }
}
