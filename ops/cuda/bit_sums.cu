// Checksums of the bits of many tensors at once. Compiled at run time by ops/bit_sums.py, which documents them.
//
// A tensor is cut into chunks of CHUNK elements, and a block does one chunk: a single pass over memory. Sums of integers
// do not depend on their order, so that atomics give the same bits each time.

typedef long long i64;
typedef unsigned long long u64;

constexpr int THREADS = 256;  // and lanes: element i of a tensor weighs 2 (i mod THREADS) + 1
constexpr int CHUNK = 4096;

struct Params {
  const int* const* tensors;  // [tensors] their elements, of four bytes
  const i64* sizes;           // [tensors] elements
  const int2* chunks;         // [chunks] tensor, and number of the chunk in it
  u64* sums;                  // [tensors], zero before
};

extern "C" __global__ void __launch_bounds__(THREADS) bit_sums(const Params p) {
  __shared__ u64 of_warp[THREADS / 32];
  const int2 place = p.chunks[blockIdx.x];
  const i64 begin = static_cast<i64>(place.y) * CHUNK;
  const int* elements = p.tensors[place.x] + begin;
  const int size = static_cast<int>(min(static_cast<i64>(CHUNK), p.sizes[place.x] - begin));
  u64 sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < size; i += THREADS) sum += static_cast<u64>(static_cast<i64>(__ldcs(elements + i)));
  sum *= 2 * threadIdx.x + 1;
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / 32; ++warp) sum += of_warp[warp];
    atomicAdd(p.sums + place.x, sum);
  }
}
