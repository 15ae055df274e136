// Cross-entropy over a vocabulary from bfloat16 logits, without logits in float32. Compiled at run time by
// ops/cross_entropy_cuda.py, which documents the arguments. A block does a row; its threads keep running sums of
// exp(logit - maximum), so that each logit is read once. Everything is computed in float32.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short bf16;  // its bits

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int VECTOR = 8;  // logits that a thread reads at once

struct Params {
  const bf16* logits;     // [rows, vocabulary]
  const i64* labels;      // [rows]
  float *loss, *log_z, *correct;    // [rows]
  const float *dloss, *dlog_z;      // [rows]
  bf16* dlogits;          // [rows, vocabulary]
  i64 rows;
  int vocabulary;         // a multiple of 8
};

__device__ __forceinline__ float at(const uint4& words, int i) {
  const u32 word = i / 2 == 0 ? words.x : i / 2 == 1 ? words.y : i / 2 == 2 ? words.z : words.w;
  return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The largest logit with its place (the first of several), and the sum of exp(logit - largest).
struct Running {
  float largest, sum;
  int place;
};

__device__ __forceinline__ Running merge(const Running& a, const Running& b) {
  const bool first = a.largest > b.largest || (a.largest == b.largest && a.place < b.place);
  const Running &top = first ? a : b, &other = first ? b : a;
  const float rest = other.sum == 0.0f ? 0.0f : other.sum * __expf(other.largest - top.largest);  // keeps a NaN
  return {top.largest, top.sum + rest, top.place};
}

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_forward(const __grid_constant__ Params p) {
  const i64 row = blockIdx.x;
  const bf16* logits = p.logits + row * p.vocabulary;
  Running own = {-__uint_as_float(0x7F800000u), 0.0f, 0x7FFFFFFF};
#pragma unroll 4
  for (int start = threadIdx.x * VECTOR; start < p.vocabulary; start += THREADS * VECTOR) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(logits + start));
    float largest = at(words, 0);
    int place = 0;
#pragma unroll
    for (int i = 1; i < VECTOR; ++i)
      if (at(words, i) > largest) largest = at(words, i), place = i;
    if (largest > own.largest) {
      own.sum *= __expf(own.largest - largest);
      own.largest = largest, own.place = start + place;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) own.sum += __expf(at(words, i) - own.largest);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Running other = {__shfl_xor_sync(0xFFFFFFFFu, own.largest, distance),
                           __shfl_xor_sync(0xFFFFFFFFu, own.sum, distance),
                           __shfl_xor_sync(0xFFFFFFFFu, own.place, distance)};
    own = merge(own, other);
  }
  __shared__ Running parts[WARPS];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < WARPS; ++i) own = merge(own, parts[i]);
    const i64 label = p.labels[row];
    const float log_z = own.largest + logf(own.sum);
    // A label that is no id of the vocabulary makes its loss NaN, which no run overlooks.
    const bool known = label >= 0 && label < p.vocabulary;
    p.loss[row] = known ? log_z - __uint_as_float((u32)logits[label] << 16) : __uint_as_float(0x7FC00000u);
    p.log_z[row] = log_z;
    p.correct[row] = own.place == label ? 1.0f : 0.0f;
  }
}

// dlogits = (dloss + dlog_z) softmax - dloss one_hot(label)
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_backward(const __grid_constant__ Params p) {
  const i64 row = blockIdx.x;
  const bf16* logits = p.logits + row * p.vocabulary;
  bf16* dlogits = p.dlogits + row * p.vocabulary;
  const float dloss = p.dloss ? p.dloss[row] : 0.0f;
  const float scale = dloss + (p.dlog_z ? p.dlog_z[row] : 0.0f), log_z = p.log_z[row];
  const int label = (int)p.labels[row];
#pragma unroll 4
  for (int start = threadIdx.x * VECTOR; start < p.vocabulary; start += THREADS * VECTOR) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(logits + start));
    float gradient[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      gradient[i] = scale == 0.0f ? 0.0f : scale * __expf(at(words, i) - log_z);
      if (start + i == label) gradient[i] -= dloss;
    }
    *reinterpret_cast<uint4*>(dlogits + start) = make_uint4(
        pack(gradient[0], gradient[1]), pack(gradient[2], gradient[3]), pack(gradient[4], gradient[5]),
        pack(gradient[6], gradient[7]));
  }
}
