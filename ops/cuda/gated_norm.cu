// layer_norm(value * gelu(gate)) without affine weights, forward and backward, in one pass over memory each. Compiled at
// run time by ops/gated_norm_cuda.py, which defines WIDTH (features of a row), WARPS (that share a row), ACTIVATION
// (0: gelu, 1: its tanh approximation, 2: silu, 3: the square of relu) and NORM (0: value * activation(gate) alone,
// without statistics), and documents the arguments. Everything is computed in float32.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int ROWS = WARPS == 1 ? 4 : 1;                       // of a block
constexpr int THREADS = 32 * WARPS * ROWS;
constexpr int VECTOR = WIDTH % (256 * WARPS) == 0 ? 8 : 4;     // features that a thread reads at once
constexpr int WORDS = VECTOR / 2;
constexpr int CHUNKS = WIDTH / (32 * WARPS * VECTOR);
constexpr int ELEMENTS = CHUNKS * VECTOR;                      // features of a thread

struct Params {
  const bf16 *value, *gate;  // rows of WIDTH features, value_stride and gate_stride apart
  bf16* out;                 // [rows, WIDTH]
  float2* statistics;        // [rows] mean and 1 / standard deviation of value * gelu(gate)
  const bf16* dout;          // [rows, WIDTH]
  bf16 *dvalue, *dgate;      // rows of WIDTH features, dvalue_stride and dgate_stride apart
  i64 value_stride, gate_stride, dvalue_stride, dgate_stride;
  i64 rows;
  float eps;
};

struct Words {
  u32 word[WORDS];
};

__device__ __forceinline__ Words load(const bf16* place) {
  Words words;
  if constexpr (VECTOR == 8) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(place));
    words.word[0] = v.x, words.word[1] = v.y, words.word[2] = v.z, words.word[3] = v.w;
  } else {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(place));
    words.word[0] = v.x, words.word[1] = v.y;
  }
  return words;
}

__device__ __forceinline__ void store(bf16* place, const Words& words) {
  if constexpr (VECTOR == 8)
    *reinterpret_cast<uint4*>(place) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
  else
    *reinterpret_cast<uint2*>(place) = make_uint2(words.word[0], words.word[1]);
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Feature i of a chunk.
__device__ __forceinline__ float at(const Words& words, int i) {
  const u32 word = words.word[i / 2];
  return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
}

__device__ __forceinline__ float2 row_sum(float2 x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x.x += __shfl_xor_sync(0xFFFFFFFFu, x.x, distance);
    x.y += __shfl_xor_sync(0xFFFFFFFFu, x.y, distance);
  }
  if constexpr (WARPS > 1) {
    __shared__ float2 parts[WARPS];
    __syncthreads();  // the parts of the sum before this one have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) x.x += parts[i].x, x.y += parts[i].y;
  }
  return x;
}

// The activation of x and its derivative.
__device__ __forceinline__ float2 activation(float x) {
#if ACTIVATION == 3
  const float positive = fmaxf(x, 0.0f);
  return make_float2(positive * positive, 2.0f * positive);
#elif ACTIVATION == 2
  const float s = __fdividef(1.0f, 1.0f + __expf(-x));
  return make_float2(x * s, s + x * s * (1.0f - s));
#elif ACTIVATION == 1
  // tanh's form x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const float square = x * x;
  const float s = __fdividef(1.0f, 1.0f + __expf(-1.5957691216f * x * (1.0f + 0.044715f * square)));
  return make_float2(x * s, s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * square));
#else
  const float cumulative = 0.5f + 0.5f * erff(x * 0.70710678119f);
  return make_float2(x * cumulative, cumulative + x * 0.39894228040f * __expf(-0.5f * x * x));
#endif
}

struct Place {
  i64 row;
  int thread;  // of those that share the row
  __device__ __forceinline__ int feature(int chunk) const { return (chunk * 32 * WARPS + thread) * VECTOR; }
};

__device__ __forceinline__ Place place() {
  if constexpr (WARPS == 1) return {(i64)blockIdx.x * ROWS + threadIdx.x / 32, (int)threadIdx.x % 32};
  return {(i64)blockIdx.x, (int)threadIdx.x};
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_norm_forward(const __grid_constant__ Params p) {
  const Place own = place();
  if (own.row >= p.rows) return;
  float product[ELEMENTS];
  float sum = 0.0f;
  Words value[CHUNKS], gate[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    value[c] = load(p.value + own.row * p.value_stride + own.feature(c));
    gate[c] = load(p.gate + own.row * p.gate_stride + own.feature(c));
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      product[c * VECTOR + i] = at(value[c], i) * activation(at(gate[c], i)).x;
      sum += product[c * VECTOR + i];
    }
#if NORM
  const float mean = row_sum(make_float2(sum, 0.0f)).x * (1.0f / WIDTH);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) product[i] -= mean, square += product[i] * product[i];
  const float deviation = rsqrtf(row_sum(make_float2(square, 0.0f)).x * (1.0f / WIDTH) + p.eps);
#else
  const float deviation = 1.0f;
#endif
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    Words words;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      words.word[i] = pack(product[c * VECTOR + 2 * i] * deviation, product[c * VECTOR + 2 * i + 1] * deviation);
    store(p.out + own.row * WIDTH + own.feature(c), words);
  }
#if NORM
  if (own.thread == 0) p.statistics[own.row] = make_float2(mean, deviation);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_norm_backward(const __grid_constant__ Params p) {
  const Place own = place();
  if (own.row >= p.rows) return;
  Words value[CHUNKS], gate[CHUNKS], dout[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    value[c] = load(p.value + own.row * p.value_stride + own.feature(c));
    gate[c] = load(p.gate + own.row * p.gate_stride + own.feature(c));
    dout[c] = load(p.dout + own.row * WIDTH + own.feature(c));
  }
#if NORM
  float2 sums = make_float2(0.0f, 0.0f);
  const float2 statistics = p.statistics[own.row];
  const float mean = statistics.x, deviation = statistics.y;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float gradient = at(dout[c], i);
      sums.x += gradient;
      sums.y += gradient * (at(value[c], i) * activation(at(gate[c], i)).x - mean) * deviation;
    }
  sums = row_sum(sums);
  sums.x *= 1.0f / WIDTH, sums.y *= 1.0f / WIDTH;
#endif
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    Words of_value, of_gate;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      // Hidden from the compiler, which would else keep what it computed of the gates above: registers for occupancy.
      asm volatile("" : "+r"(gate[c].word[i]));
      float dvalue[2], dgate[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float v = at(value[c], 2 * i + j);
        const float2 both = activation(at(gate[c], 2 * i + j));
        float dproduct = at(dout[c], 2 * i + j);
#if NORM
        const float normalised = (v * both.x - mean) * deviation;
        dproduct = deviation * (dproduct - sums.x - normalised * sums.y);
#endif
        dvalue[j] = dproduct * both.x;
        dgate[j] = dproduct * v * both.y;
      }
      of_value.word[i] = pack(dvalue[0], dvalue[1]);
      of_gate.word[i] = pack(dgate[0], dgate[1]);
    }
    store(p.dvalue + own.row * p.dvalue_stride + own.feature(c), of_value);
    store(p.dgate + own.row * p.dgate_stride + own.feature(c), of_gate);
  }
}
