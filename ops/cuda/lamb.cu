// Clipping, LAMB, what of Muon goes element by element, and the average of the weights, over all parameters at once.
// Compiled at run time by ops/lamb_cuda.py, which documents the arguments.
//
// A tensor is cut into chunks of CHUNK elements, and a block does one chunk. Five kernels, in this order:
//   gradient_squares   each chunk's sum of squared gradients                          reads g
//   gradient_norm      their sum, hence the norm and the factor that clips            one block
//   moments            new moments; each chunk's sums of w^2 and u^2                  reads g m v w, writes m v
//   trust_ratios       |w| / |u| of each tensor                                       one block a tensor
//   apply              w - lr trust u, and the average                                reads m v w a, writes w a
// and for tensors without trust ratio, instead of the last three,
//   moments_and_apply                                                                 reads g m v w a, writes m v w a
// Matrices of one shape that Muon updates (ops/muon.py), a tensor each, lie one behind the other in a stack of bfloat16:
//   momenta            new momentum; the update, unscaled, and each chunk's sum of its squares        reads g m, writes m u
//   trust_ratios       1 / |u| of each matrix, by which ops/muon_cuda.py makes directions d of them
//   row_squares        NorMuon's mean squares and scales of rows; a warp a row                        reads d
//   row_scales         these scales, such that entries of each matrix get a root mean square          one block a matrix
//   descend            w - lr (scale d + decay w), and the average                                    reads d w a, writes w a
// Sums run over chunks and threads in a fixed order, without atomics: the same input gives the same bits.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short bf16;  // its bits

constexpr int THREADS = 256;
constexpr int CHUNK = 4096;  // longer ones were slower: a block's loop waits for its loads, another block does not

// Per tensor: addresses of weight, first moment, second moment and average (0 where there is none), elements. Matrices
// have their momentum as first, and NorMuon's mean squares of rows as second moment.
struct Tensor {
  float *weight, *first, *second, *average;
  i64 size;
};

struct Params {
  const Tensor* tensors;            // [tensors]
  const float* const* gradients;    // [tensors]
  const int2* chunks;               // [chunks] tensor, and number of the chunk in it
  const int2* spans;                // [tensors] first chunk, and how many
  float* squares;                   // [chunks] of gradients
  float2* sums;                     // [chunks] of w^2 and u^2
  float* clip;                      // [2] norm of all gradients, factor
  float* trust;                     // [tensors]
  int n_chunks;
  int first_chunk;                  // of this launch: block 0 does it
  int first_tensor;
  float max_norm;
  float first_step, second_step;    // 1 - beta1, 1 - beta2: rounded once, from double
  float beta2;
  float first_correction;           // 1 / (1 - beta1^t)
  float second_correction;          // 1 / sqrt(1 - beta2^t)
  float eps, weight_decay, lr;
  float average_step;               // 1 - decay of the average
  bf16* stack;                      // [matrices, rows, columns] updates, later their directions
  float* scales;                    // [matrices, rows] of directions (0: `scale`), and behind them as many sums
  i64 rows, columns;
  int n_matrices;
  float momentum_step;              // of Nesterov's update from gradient to momentum
  float row_step;                   // 1 - decay of NorMuon's mean squares
  float scale;                      // of directions; NorMuon's: root mean square of their entries
  int cautious;                     // decay only of entries that come closer to 0
};

// Where a chunk lies in memory. vectors: leading elements that are read and written four at a time, a multiple of four;
// 0 where an address forbids it.
struct Chunk {
  float *weight, *first, *second, *average;
  const float* gradient;
  i64 begin;                        // in the tensor
  int tensor, size, vectors;
  bool gradient_vectors;
};

__device__ inline bool aligned(const void* address) { return (reinterpret_cast<i64>(address) & 15) == 0; }

__device__ inline Chunk find(const Params& p, int number) {
  const int2 place = p.chunks[number];
  const Tensor tensor = p.tensors[place.x];
  const i64 begin = static_cast<i64>(place.y) * CHUNK;
  Chunk c;
  c.tensor = place.x;
  c.begin = begin;
  c.size = static_cast<int>(min(static_cast<i64>(CHUNK), tensor.size - begin));
  c.weight = tensor.weight + begin;
  c.first = tensor.first + begin;
  c.second = tensor.second + begin;
  c.average = tensor.average ? tensor.average + begin : nullptr;
  c.gradient = p.gradients[place.x] + begin;
  const bool all = aligned(c.weight) && aligned(c.first) && aligned(c.second) && aligned(c.average);
  c.vectors = all ? c.size & ~3 : 0;
  c.gradient_vectors = aligned(c.gradient);
  return c;
}

// A gradient may be a view from any multiple of four bytes on (those of training/gradients.py begin at multiples of 256).
__device__ inline float4 load_gradient(const Chunk& c, int i) {
  if (c.gradient_vectors) return __ldcs(reinterpret_cast<const float4*>(c.gradient + i));
  return make_float4(__ldcs(c.gradient + i), __ldcs(c.gradient + i + 1), __ldcs(c.gradient + i + 2),
                     __ldcs(c.gradient + i + 3));
}

// Streaming: nothing stays in the second-level cache until the next pass, so nothing should be kept for it.
__device__ inline float4 load(const float* x, int i) { return __ldcs(reinterpret_cast<const float4*>(x + i)); }
__device__ inline void store(float* x, int i, float4 value) { __stcs(reinterpret_cast<float4*>(x + i), value); }

// The sum of `value` over the block, in thread 0.
__device__ inline float block_sum(float value) {
  __shared__ float of_warp[THREADS / 32];
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  __syncthreads();  // of_warp may still be read by the call before
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < THREADS / 32; ++warp) value += of_warp[warp];
  return value;
}

__device__ inline void new_moments(const Params& p, float factor, float g, float& m, float& v) {
  g *= factor;
  m += p.first_step * (g - m);
  v = p.beta2 * v + p.second_step * g * g;
}

__device__ inline float update(const Params& p, float m, float v, float w) {
  return m / (sqrtf(v) * p.second_correction + p.eps) * p.first_correction + p.weight_decay * w;
}

// torch.lerp: exact at both ends.
__device__ inline float lerp(float a, float b, float step) {
  return step < 0.5f ? a + step * (b - a) : b - (b - a) * (1 - step);
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_squares(const Params p) {
  const int2 place = p.chunks[blockIdx.x];
  const i64 begin = static_cast<i64>(place.y) * CHUNK;
  Chunk c;
  c.size = static_cast<int>(min(static_cast<i64>(CHUNK), p.tensors[place.x].size - begin));
  c.gradient = p.gradients[place.x] + begin;
  c.gradient_vectors = aligned(c.gradient);
  const int vectors = c.size & ~3;
  float sum = 0;
  for (int base = 4 * threadIdx.x; base < vectors; base += 4 * 4 * THREADS) {
    float4 g[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = base + k * 4 * THREADS;
      g[k] = i < vectors ? load_gradient(c, i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += (g[k].x * g[k].x + g[k].y * g[k].y) + (g[k].z * g[k].z + g[k].w * g[k].w);
  }
  for (int i = vectors + threadIdx.x; i < c.size; i += THREADS) sum += c.gradient[i] * c.gradient[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.squares[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_norm(const Params p) {
  float sum = 0;
  for (int i = threadIdx.x; i < p.n_chunks; i += THREADS) sum += p.squares[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    const float norm = sqrtf(sum), factor = p.max_norm / (norm + 1e-6f);
    p.clip[0] = norm;
    p.clip[1] = factor > 1 ? 1.0f : factor;  // not fminf: a norm that is not a number must show
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) moments(const Params p) {
  const int number = p.first_chunk + blockIdx.x;
  const Chunk c = find(p, number);
  const float factor = p.clip[1];
  float of_weights = 0, of_updates = 0;
  for (int i = 4 * threadIdx.x; i < c.vectors; i += 4 * THREADS) {
    const float4 g = load_gradient(c, i), w = load(c.weight, i);
    float4 m = load(c.first, i), v = load(c.second, i);
#define ONE(x)                                  \
  new_moments(p, factor, g.x, m.x, v.x);          \
  {                                             \
    const float u = update(p, m.x, v.x, w.x);   \
    of_weights += w.x * w.x, of_updates += u * u; \
  }
    ONE(x) ONE(y) ONE(z) ONE(w)
#undef ONE
    store(c.first, i, m);
    store(c.second, i, v);
  }
  for (int i = c.vectors + threadIdx.x; i < c.size; i += THREADS) {
    new_moments(p, factor, c.gradient[i], c.first[i], c.second[i]);
    const float w = c.weight[i], u = update(p, c.first[i], c.second[i], w);
    of_weights += w * w, of_updates += u * u;
  }
  of_weights = block_sum(of_weights);
  of_updates = block_sum(of_updates);
  if (threadIdx.x == 0) p.sums[number] = make_float2(of_weights, of_updates);
}

extern "C" __global__ void __launch_bounds__(THREADS) trust_ratios(const Params p) {
  const int tensor = p.first_tensor + blockIdx.x;
  const int2 span = p.spans[tensor];
  float of_weights = 0, of_updates = 0;
  for (int i = threadIdx.x; i < span.y; i += THREADS) {
    const float2 sums = p.sums[span.x + i];
    of_weights += sums.x, of_updates += sums.y;
  }
  of_weights = sqrtf(block_sum(of_weights));
  of_updates = sqrtf(block_sum(of_updates));
  if (threadIdx.x == 0) p.trust[tensor] = of_weights > 0 && of_updates > 0 ? of_weights / of_updates : 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) apply(const Params p) {
  const Chunk c = find(p, p.first_chunk + blockIdx.x);
  const float rate = p.lr * p.trust[c.tensor];
  const bool averages = c.average != nullptr;
  for (int i = 4 * threadIdx.x; i < c.vectors; i += 4 * THREADS) {
    const float4 m = load(c.first, i), v = load(c.second, i);
    float4 w = load(c.weight, i), a = averages ? load(c.average, i) : make_float4(0, 0, 0, 0);
#define ONE(x)                                \
  w.x -= rate * update(p, m.x, v.x, w.x);     \
  a.x = lerp(a.x, w.x, p.average_step);
    ONE(x) ONE(y) ONE(z) ONE(w)
#undef ONE
    store(c.weight, i, w);
    if (averages) store(c.average, i, a);
  }
  for (int i = c.vectors + threadIdx.x; i < c.size; i += THREADS) {
    const float w = c.weight[i] - rate * update(p, c.first[i], c.second[i], c.weight[i]);
    c.weight[i] = w;
    if (averages) c.average[i] = lerp(c.average[i], w, p.average_step);
  }
}

// Tensors without trust ratio are biases and layer norms, a thousandth of a model: plain loops are fast enough.
extern "C" __global__ void __launch_bounds__(THREADS) moments_and_apply(const Params p) {
  const Chunk c = find(p, p.first_chunk + blockIdx.x);
  const float factor = p.clip[1];
  for (int i = threadIdx.x; i < c.size; i += THREADS) {
    float m = c.first[i], v = c.second[i];
    new_moments(p, factor, c.gradient[i], m, v);
    const float w = c.weight[i] - p.lr * update(p, m, v, c.weight[i]);
    c.first[i] = m, c.second[i] = v, c.weight[i] = w;
    if (c.average) c.average[i] = lerp(c.average[i], w, p.average_step);
  }
}

__device__ inline u32 pack(float low, float high) {
  u32 packed = 0;
#if __CUDA_ARCH__ >= 800  // no older device gets here
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ inline float low_half(u32 packed) { return __uint_as_float(packed << 16); }
__device__ inline float high_half(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// Where a chunk of a matrix lies in the stack, and how much of it goes four at a time.
__device__ inline bf16* in_stack(const Params& p, const Chunk& c) {
  return p.stack + (c.tensor - p.first_tensor) * p.rows * p.columns + c.begin;
}
__device__ inline int vectors_of(const Params& p, const Chunk& c) { return p.columns % 4 ? 0 : c.vectors; }

// Sums, as trust_ratios reads them, are 1 in all and the update's squares.
extern "C" __global__ void __launch_bounds__(THREADS) momenta(const Params p) {
  const int number = p.first_chunk + blockIdx.x;
  const Chunk c = find(p, number);
  bf16* out = in_stack(p, c);
  const int vectors = vectors_of(p, c);
  const float factor = p.clip[1];
  float squares = 0;
  for (int i = 4 * threadIdx.x; i < vectors; i += 4 * THREADS) {
    const float4 g = load_gradient(c, i);
    float4 m = load(c.first, i), u;
#define ONE(x)                                                              \
  m.x += p.first_step * (factor * g.x - m.x);                               \
  u.x = lerp(factor * g.x, m.x, p.momentum_step), squares += u.x * u.x;
    ONE(x) ONE(y) ONE(z) ONE(w)
#undef ONE
    store(c.first, i, m);
    *reinterpret_cast<uint2*>(out + i) = make_uint2(pack(u.x, u.y), pack(u.z, u.w));
  }
  for (int i = vectors + threadIdx.x; i < c.size; i += THREADS) {
    const float g = factor * c.gradient[i], m = c.first[i] + p.first_step * (g - c.first[i]);
    const float u = lerp(g, m, p.momentum_step);
    c.first[i] = m, out[i] = static_cast<bf16>(pack(u, 0)), squares += u * u;
  }
  squares = block_sum(squares);
  if (threadIdx.x == 0) p.sums[number] = make_float2(c.begin ? 0 : 1, squares);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_squares(const Params p) {
  const i64 row = static_cast<i64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, all = p.n_matrices * p.rows;
  if (row >= all) return;
  const bf16* d = p.stack + row * p.columns;
  const int lane = threadIdx.x % 32;
  float sum = 0;
  if (p.columns % 8 == 0) {
    const uint4* vectors = reinterpret_cast<const uint4*>(d);
    for (i64 i = lane; i < p.columns / 8; i += 32) {
      const uint4 v = vectors[i];
#define PAIR(x) sum += low_half(v.x) * low_half(v.x) + high_half(v.x) * high_half(v.x);
      PAIR(x) PAIR(y) PAIR(z) PAIR(w)
#undef PAIR
    }
  } else {
    for (i64 i = lane; i < p.columns; i += 32) sum += low_half(d[i]) * low_half(d[i]);
  }
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) {
    float* second = p.tensors[p.first_tensor + row / p.rows].second + row % p.rows;
    const float mean = *second + p.row_step * (sum / p.columns - *second);
    const float scale = 1 / (sqrtf(mean) + p.eps);
    *second = mean, p.scales[row] = scale, p.scales[all + row] = sum * scale * scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) row_scales(const Params p) {
  __shared__ float factor;
  float *scales = p.scales + blockIdx.x * p.rows, *sums = scales + p.n_matrices * p.rows, sum = 0;
  for (i64 i = threadIdx.x; i < p.rows; i += THREADS) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) factor = p.scale * sqrtf(static_cast<float>(p.rows * p.columns)) / fmaxf(sqrtf(sum), 1e-7f);
  __syncthreads();
  for (i64 i = threadIdx.x; i < p.rows; i += THREADS) scales[i] *= factor;
}

__device__ inline void descend_one(const Params& p, float rate, float d, float& w, float& a) {
  if (!p.cautious || w * d > 0) w -= p.lr * p.weight_decay * w;
  w -= rate * d;
  a = lerp(a, w, p.average_step);
}

extern "C" __global__ void __launch_bounds__(THREADS) descend(const Params p) {
  const Chunk c = find(p, p.first_chunk + blockIdx.x);
  const bf16* directions = in_stack(p, c);
  const float* scales = p.scales ? p.scales + (c.tensor - p.first_tensor) * p.rows : nullptr;
  const int vectors = vectors_of(p, c);
  const u32 begin = static_cast<u32>(c.begin), columns = static_cast<u32>(p.columns);
  const bool averages = c.average != nullptr;
  for (int i = 4 * threadIdx.x; i < vectors; i += 4 * THREADS) {
    const float rate = p.lr * (scales ? scales[(begin + i) / columns] : p.scale);
    const uint2 d = *reinterpret_cast<const uint2*>(directions + i);
    float4 w = load(c.weight, i), a = averages ? load(c.average, i) : make_float4(0, 0, 0, 0);
    descend_one(p, rate, low_half(d.x), w.x, a.x), descend_one(p, rate, high_half(d.x), w.y, a.y);
    descend_one(p, rate, low_half(d.y), w.z, a.z), descend_one(p, rate, high_half(d.y), w.w, a.w);
    store(c.weight, i, w);
    if (averages) store(c.average, i, a);
  }
  for (int i = vectors + threadIdx.x; i < c.size; i += THREADS) {
    const float rate = p.lr * (scales ? scales[(begin + i) / columns] : p.scale);
    float w = c.weight[i], a = averages ? c.average[i] : 0;
    descend_one(p, rate, low_half(directions[i]), w, a);
    c.weight[i] = w;
    if (averages) c.average[i] = a;
  }
}
