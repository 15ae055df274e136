// Disentangled relative attention, forward and backward. Compiled at run time by ops/attention_cuda.py, which defines
// HEAD_DIM (32, 64 or 128), DROPOUT (0 or 1), FORWARD_STAGES and BACKWARD_STAGES (1 or 2), and documents the arguments.
//
// A block of four warps owns 64 rows of one head and walks over tiles of 64 columns. Rows are queries and columns keys
// in the forward kernel and in the kernel of dQ; they are keys and queries in the kernel of dK and dV. Everything is
// written in terms of e = column - row: u(e) is the slot of the distance e, and because buckets are antisymmetric the
// slot of query minus key is u in the one orientation and S - 1 - u in the other. Position tables are loaded in the
// order of u, so that one lookup table serves both.
//
// Position scores: row @ position^T and column @ position^T are small matrix products, kept in shared memory as
// bfloat16 [64, slots] ("tables"), from which each score gathers two values. Row strides are chosen so that the lanes of
// a warp hit different banks both near the diagonal (the slot changes by one with each column) and far from it.
//
// Gradients of the tables: dT[row, u] = sum of dS[row, column] over columns with u(column - row) = u. Each warp writes
// its 16 x 64 tile of dS skewed, at [row, column - row], and multiplies it by a one-hot matrix [distance, u], whose
// fragments are precomputed. Almost all of that matrix is zero: 16 distances share one or two groups of 8 slots.
// No atomics anywhere: the result is the same bit for bit on every run.

typedef unsigned char u8;
typedef unsigned short u16;  // also: the bits of a bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1
#else
#define WGMMA 0
#endif

constexpr int D = HEAD_DIM;
constexpr int TILE = 64;                                 // rows of a block, columns of a step, and slots (padded)
constexpr int THREADS = 128;
constexpr int CHUNKS = D / 8;                            // 16-byte pieces of a row
constexpr int ROW_BYTES = D < 64 ? 2 * D : 128;          // of a panel; wider heads are several panels of 64 features
constexpr int PANEL_BYTES = TILE * ROW_BYTES;
constexpr int TILE_BYTES = TILE * D * 2;
constexpr int N_TILES = D / 8;                           // mma tiles of 8 features

constexpr int OWN_STRIDE = 142;                          // bytes between rows of the row table (71 bfloat16)
constexpr int COLUMN_STRIDE = 140;                       // and of the column table
constexpr int SKEW_STRIDE = 176;
constexpr int DT_STRIDE = 68;                            // floats

// Shared memory, in bytes from its start. Tiles come first: they must be aligned to 1024. With two stages the next
// columns are on their way while these are computed on; one stage is for devices with little shared memory.
template <bool BACKWARD>
struct Shared {
  static constexpr int stages = BACKWARD ? BACKWARD_STAGES : FORWARD_STAGES;
  static constexpr int own = 0;
  static constexpr int own_position = (BACKWARD ? 2 : 1) * TILE_BYTES;
  static constexpr int column_position = own_position + TILE_BYTES;
  static constexpr int columns = column_position + TILE_BYTES;    // stages of two tiles
  static constexpr int own_table = columns + stages * 2 * TILE_BYTES;
  static constexpr int column_table = own_table + TILE * OWN_STRIDE;
  static constexpr int slots = column_table + TILE * COLUMN_STRIDE;  // uint2 [128]: byte offsets of u(e), u(e + 1)
  static constexpr int column_hash = slots + 128 * 8;             // int [64]
  static constexpr int column_lse = column_hash + TILE * 4;       // float [64]
  static constexpr int column_delta = column_lse + TILE * 4;      // float [64]
  static constexpr int groups = column_delta + TILE * 4;          // int4 [8]
  static constexpr int skew = (groups + 128 + 15) / 16 * 16;
  static constexpr int dtable = skew + 4 * 16 * SKEW_STRIDE;
  static constexpr int bytes = BACKWARD ? dtable + TILE * DT_STRIDE * 4 : column_lse;
};

struct Params {
  const u16 *query, *key, *value, *context, *dcontext, *query_pos, *key_pos;
  u16 *out, *dquery, *dkey, *dvalue, *dpositions;
  float *lse, *delta, *partial;
  const int *spans;            // [B, T, 2]: first and last + 1 token of each token's document; 0, 0 for padding
  const u8 *causal;            // [B]
  const int *slots;            // [2 * padded + 1]: u(e) for e from -padded
  const uint2 *fragments;      // [number, 32]: one-hot operands, see ops/attention_metadata.py
  const int4 *groups;          // [8]: first and last step of distances that hold the group's slots, base of fragments
  const int *row_hash;         // [B, H, T]
  const int *column_hash;      // [>= T]
  i64 qk_batch, qk_token, v_batch, v_token, dqk_batch, dqk_token;  // strides in elements; heads are D apart
  i64 pos_slot;
  int batch, length, heads, n_slots, padded, parts;
  int threshold;               // keep where hash >= threshold
  float scale, keep_scale;     // 1 / sqrt(3 D); 1 / (1 - p)
};

extern __shared__ __align__(1024) char smem[];

template <typename T>
__device__ __forceinline__ T &at(u32 offset) {
  return *reinterpret_cast<T *>(smem + offset);
}

__device__ __forceinline__ u32 shared_base() { return (u32)__cvta_generic_to_shared(smem); }

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float widen(u32 bits) { return __uint_as_float(bits << 16); }

#define INF __uint_as_float(0x7F800000u)

// ---------------------------------------------------------------------------------------------------------------
// Copies

__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
  // 16-byte pieces are permuted within groups of 8 rows: the layout of wgmma's 128-byte (64-byte) swizzle, in which
  // ldmatrix has no bank conflicts either.
  if (D < 64) return row * 64 + ((chunk ^ (row >> 1)) & 3) * 16;
  return (chunk >> 3) * PANEL_BYTES + row * 128 + ((chunk ^ row) & 7) * 16;
}

__device__ __forceinline__ void copy_async(u32 destination, const void *source, bool valid) {
  int bytes = valid ? 16 : 0;  // the rest of the 16 bytes is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
#if WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Rows first .. first + 63 of [length, D], `stride` elements apart; rows from `length` on are zeros.
__device__ __forceinline__ void load_tile(u32 destination, const u16 *source, i64 stride, int first, int length) {
  constexpr int ROWS = THREADS / CHUNKS;  // copied at a time, a multiple of 8: the permutation is the same in all turns
  const int row = first + (int)threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const u32 place = shared_base() + destination + tile_offset(threadIdx.x / CHUNKS, chunk);
  const u16 *from = source + row * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < TILE / ROWS; ++i) {
    copy_async(place + i * ROWS * ROW_BYTES, from, row + i * ROWS < length);  // what is not valid is not read
    from += ROWS * stride;
  }
}

// The position table of one head in the order of u.
__device__ __forceinline__ void load_positions(u32 destination, const u16 *source, const Params &p, bool reverse) {
#pragma unroll
  for (int i = 0; i < TILE * CHUNKS / THREADS; ++i) {
    int index = i * THREADS + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
    bool valid = row < p.n_slots;
    int slot = reverse ? p.n_slots - 1 - row : row;
    copy_async(shared_base() + destination + tile_offset(row, chunk),
               source + (valid ? slot * p.pos_slot : 0) + chunk * 8, valid);
  }
}

// This warp's 16 rows of a staged tile to [length, D] in global memory.
__device__ __forceinline__ void store_rows(u32 tile, u16 *destination, i64 stride, int first, int length) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * CHUNKS / 32; ++i) {
    int index = i * 32 + lane, row = warp * 16 + index / CHUNKS, chunk = index % CHUNKS;
    if (first + row < length)
      *reinterpret_cast<uint4 *>(destination + (first + row) * stride + chunk * 8) =
          at<uint4>(tile + tile_offset(row, chunk));
  }
  __syncwarp();
}

// Stage accumulators (this warp's 16 rows) in a tile as bfloat16.
__device__ __forceinline__ void stage_rows(u32 tile, const float (&x)[N_TILES][4], float low, float high) {
  int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) {
    at<u32>(tile + tile_offset(row, n) + lane % 4 * 4) = pack(x[n][0] * low, x[n][1] * low);
    at<u32>(tile + tile_offset(row + 8, n) + lane % 4 * 4) = pack(x[n][2] * high, x[n][3] * high);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Matrix products. Accumulators are those of mma.m16n8: lane 4 g + t holds rows g, g, g + 8, g + 8 and columns 2 t,
// 2 t + 1, 2 t, 2 t + 1 of each 8 columns. On sm_90a a warpgroup's wgmma has the same layout, each warp 16 rows.

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if WGMMA
// Descriptor of an operand in shared memory: start address (of a multiple of 16 bytes, below 2^18), stride between groups
// of 8 rows (both in 16 bytes), and the swizzle (1: 128 bytes, 2: 64 bytes).
__device__ __forceinline__ u64 descriptor(u32 address) {
  constexpr u32 upper = (8 * ROW_BYTES >> 4) | ((ROW_BYTES == 128 ? 1u : 2u) << 30);
  u64 result;
  asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"((address >> 4) | (1u << 16)), "r"(upper));
  return result;
}

#define ROW8(x, n) "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define ROWS4(x, n) ROW8(x, n), ROW8(x, n + 1), ROW8(x, n + 2), ROW8(x, n + 3)

template <int N>
__device__ __forceinline__ void fence_registers(float (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : ROW8(x, n)::"memory");
}
__device__ __forceinline__ void fence_registers(u32 (&x)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) asm volatile("" : "+r"(x[n][0]), "+r"(x[n][1]), "+r"(x[n][2]), "+r"(x[n][3])::"memory");
}
#define WGMMA_ACC32                                                                                           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#endif

__device__ __forceinline__ void begin_products() {
#if WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#if WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void wait_products() {
#if WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
#if !WGMMA
template <int N>
__device__ __forceinline__ void fence_registers(float (&)[N][4]) {}
__device__ __forceinline__ void fence_registers(u32 (&)[4][4]) {}
#endif

// acc [64, 64] = a [64, D] @ b [64, D]^T, both tiles in shared memory.
__device__ __forceinline__ void product_of_tiles(float (&acc)[8][4], u32 a, u32 b) {
#if WGMMA
  const u64 left = descriptor(shared_base() + a), right = descriptor(shared_base() + b);
  fence_registers(acc);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    u32 offset = D < 64 ? k * 32 : (k / 4) * PANEL_BYTES + (k % 4) * 32;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_ACC32 ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : ROWS4(acc, 0), ROWS4(acc, 4)
                 : "l"(left + offset / 16), "l"(right + offset / 16), "r"((int)(k > 0))
                 : "memory");
  }
#else
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int n = 0; n < 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    u32 left[4];
    ldmatrix(left, shared_base() + a + tile_offset(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 right[4];
      ldmatrix(right, shared_base() + b + tile_offset(n * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      mma(acc[n], left, right[0], right[1]);
      mma(acc[n + 1], left, right[2], right[3]);
    }
  }
#endif
}

// acc [64, D] += left [64, 64] (registers) @ b [64, D] (a tile in shared memory).
__device__ __forceinline__ void add_product(float (&acc)[N_TILES][4], u32 (&left)[4][4], u32 b) {
#if WGMMA
  const u64 right = descriptor(shared_base() + b);
  fence_registers(acc);
  fence_registers(left);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (D < 64) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                   "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 1;"
                   : ROWS4(acc, 0)
                   : "r"(left[k][0]), "r"(left[k][1]), "r"(left[k][2]), "r"(left[k][3]),
                     "l"(right + k * ROW_BYTES)
                   : "memory");
    } else {
#pragma unroll
      for (int n = 0; n + 8 <= N_TILES; n += 8)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_ACC32
                     ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                     : ROWS4(acc, n), ROWS4(acc, n + 4)
                     : "r"(left[k][0]), "r"(left[k][1]), "r"(left[k][2]), "r"(left[k][3]),
                       "l"(right + (n / 8 * PANEL_BYTES / 16 + k * ROW_BYTES))
                     : "memory");
    }
  }
#else
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 right[4];
      ldmatrix_transposed(right, shared_base() + b + tile_offset(k * 16 + lane % 16, n + lane / 16));
      mma(acc[n], left[k], right[0], right[1]);
      mma(acc[n + 1], left[k], right[2], right[3]);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Pieces that all kernels share

struct Item {
  int b, first;  // row of the batch, first row (token) of the tile
};

// Blocks of a head take its (row of the batch, tile) pairs in turn; tiles rotate so that no block has all the long ones.
__device__ __forceinline__ Item item_of(const Params &p, int number) {
  int tiles = (p.length + TILE - 1) / TILE, b = number / tiles;
  return {b, (number + b) % tiles * TILE};
}

// Documents of an item's rows: lane l has rows l and l + 32. Loaded an item ahead, because all else waits for them.
struct Documents {
  int2 spans[2];
  bool causal;
};

__device__ __forceinline__ Documents load_documents(const Params &p, int number, int items) {
  Documents documents = {{make_int2(0, 0), make_int2(0, 0)}, false};
  if (number >= items) return documents;
  const Item item = item_of(p, number);
  documents.causal = p.causal[item.b];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = item.first + i * 32 + (threadIdx.x & 31);
    if (row < p.length)
      documents.spans[i] = reinterpret_cast<const int2 *>(p.spans)[(i64)item.b * p.length + row];
  }
  return documents;
}

// Which columns a row may attend (or, for keys as rows, be attended by), from its span: first and number.
template <bool KEYS>
__device__ __forceinline__ int2 allowed_columns(int2 span, int row, bool causal) {
  if (causal && span.y > 0) {
    if (KEYS) span.x = row;
    else span.y = row + 1;
  }
  return make_int2(span.x, span.y - span.x);
}

// First and last + 1 tile of columns that the item's rows need, and the columns of this lane's two rows.
struct Columns {
  int2 tiles, top, bottom;
};

template <bool KEYS>
__device__ __forceinline__ Columns columns_of(const Documents &documents, int first) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int2 allowed[2];
  int low = 0x7FFFFFFF, high = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    allowed[i] = allowed_columns<KEYS>(documents.spans[i], first + i * 32 + lane, documents.causal);
    if (allowed[i].y > 0) {
      low = min(low, allowed[i].x);
      high = max(high, allowed[i].x + allowed[i].y);
    }
  }
  low = __reduce_min_sync(0xFFFFFFFFu, low);
  high = __reduce_max_sync(0xFFFFFFFFu, high);
  const int2 mine = warp < 2 ? allowed[0] : allowed[1];
  const int source = warp % 2 * 16 + lane / 4;
  Columns columns;
  columns.tiles = high == 0 ? make_int2(0, 0) : make_int2(low / TILE, (high + TILE - 1) / TILE);
  columns.top.x = __shfl_sync(0xFFFFFFFFu, mine.x, source);
  columns.top.y = __shfl_sync(0xFFFFFFFFu, mine.y, source);
  columns.bottom.x = __shfl_sync(0xFFFFFFFFu, mine.x, source + 8);
  columns.bottom.y = __shfl_sync(0xFFFFFFFFu, mine.y, source + 8);
  return columns;
}

__device__ __forceinline__ bool kept(int row_hash, int column_hash, int threshold) {
  u32 x = (u32)(row_hash ^ column_hash) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return (int)x >= threshold;
}

// A table of position scores, bfloat16 [64, slots], from this warp's 16 rows of the product.
template <int STRIDE>
__device__ __forceinline__ void store_table(u32 table, const float (&x)[8][4]) {
  int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + lane / 4;
  u32 address = table + row * STRIDE + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    u32 top = pack(x[n][0], x[n][1]), bottom = pack(x[n][2], x[n][3]);
    if (STRIDE % 4 == 0) {
      at<u32>(address + n * 16) = top;
      at<u32>(address + n * 16 + 8 * STRIDE) = bottom;
    } else {
      at<u16>(address + n * 16) = (u16)top;
      at<u16>(address + n * 16 + 2) = (u16)(top >> 16);
      at<u16>(address + n * 16 + 8 * STRIDE) = (u16)bottom;
      at<u16>(address + n * 16 + 8 * STRIDE + 2) = (u16)(bottom >> 16);
    }
  }
}

// s += row table + column table. e = column - row repeats: that of rows g + 8 in one group of 8 columns is
// that of rows g in the group before, so each pair of slots is looked up once for four scores.
template <typename S>
__device__ __forceinline__ void add_positions(float (&s)[8][4]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
  u32 slots = S::slots + (63 + 2 * t - 16 * warp - g) * 8;
  u32 own = S::own_table + (warp * 16 + g) * OWN_STRIDE, column = S::column_table + 2 * t * COLUMN_STRIDE;
  uint2 before = at<uint2>(slots - 64);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    uint2 here = at<uint2>(slots + n * 64);
    const int c = n * 8 * COLUMN_STRIDE, r = 8 * OWN_STRIDE;
    s[n][0] += widen(at<u16>(own + here.x)) + widen(at<u16>(column + here.x + c));
    s[n][1] += widen(at<u16>(own + here.y)) + widen(at<u16>(column + here.y + c + COLUMN_STRIDE));
    s[n][2] += widen(at<u16>(own + before.x + r)) + widen(at<u16>(column + before.x + c));
    s[n][3] += widen(at<u16>(own + before.y + r)) + widen(at<u16>(column + before.y + c + COLUMN_STRIDE));
    before = here;
  }
}

// -inf where a row may not attend a column; `first` is the tile's first column.
__device__ __forceinline__ void mask_scores(float (&s)[8][4], int first, int2 top, int2 bottom) {
  int column = first + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int2 span = i < 2 ? top : bottom;
      if ((u32)(column + n * 8 + (i & 1) - span.x) >= (u32)span.y) s[n][i] = -INF;
    }
}

// ---------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS) relative_attention_forward(const __grid_constant__ Params p) {
  using S = Shared<false>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
  const int h = blockIdx.x % p.heads, step = gridDim.x / p.heads;
  const int items = p.batch * ((p.length + TILE - 1) / TILE);
  const float scale = p.scale * 1.4426950408889634f;  // exponentials are base 2
  load_positions(S::own_position, p.key_pos + h * D, p, true);
  load_positions(S::column_position, p.query_pos + h * D, p, true);

  Documents documents = load_documents(p, blockIdx.x / p.heads, items);
  for (int number = blockIdx.x / p.heads; number < items; number += step) {
    const Item item = item_of(p, number);
    const Columns allowed = columns_of<false>(documents, item.first);
    const int2 range = allowed.tiles, top = allowed.top, bottom = allowed.bottom;
    const int row = item.first + warp * 16 + g;
    documents = load_documents(p, number + step, items);
    const u16 *key = p.key + item.b * p.qk_batch + h * D, *value = p.value + item.b * p.v_batch + h * D;
    const i64 line = ((i64)item.b * p.heads + h) * p.length;
    int hash_top = 0, hash_bottom = 0;
    if (DROPOUT) {
      hash_top = row < p.length ? p.row_hash[line + row] : 0;
      hash_bottom = row + 8 < p.length ? p.row_hash[line + row + 8] : 0;
    }

    load_tile(S::own, p.query + item.b * p.qk_batch + h * D, p.qk_token, item.first, p.length);
    if (range.x < range.y) {
      load_tile(S::columns, key, p.qk_token, range.x * TILE, p.length);
      load_tile(S::columns + TILE_BYTES, value, p.v_token, range.x * TILE, p.length);
    }
    commit_copies();

    float out[N_TILES][4];
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
    float max_top = -INF, max_bottom = -INF, sum_top = 0, sum_bottom = 0;

    for (int tile = range.x; tile < range.y; ++tile) {
      const int first = tile * TILE, stage = S::columns + ((tile - range.x) & (S::stages - 1)) * 2 * TILE_BYTES;
      const int e = first - item.first - 63 + (int)threadIdx.x;
      const int u0 = p.slots[e + p.padded], u1 = p.slots[min(e + 1, p.padded) + p.padded];
      int hash = 0;
      if (DROPOUT && threadIdx.x < TILE) hash = first + threadIdx.x < p.length ? p.column_hash[first + threadIdx.x] : 0;
      wait_copies();
      __syncthreads();
      if (S::stages == 2 && tile + 1 < range.y) {
        const int next = S::columns + ((tile - range.x + 1) & 1) * 2 * TILE_BYTES;
        load_tile(next, key, p.qk_token, first + TILE, p.length);
        load_tile(next + TILE_BYTES, value, p.v_token, first + TILE, p.length);
        commit_copies();
      }
      float s[8][4], table[8][4];
      begin_products();
      if (tile == range.x) {
        product_of_tiles(table, S::own, S::own_position);
        commit_products();
        wait_products<0>();
        fence_registers(table);
        store_table<OWN_STRIDE>(S::own_table, table);
        begin_products();
      }
      product_of_tiles(table, stage, S::column_position);
      commit_products();
      product_of_tiles(s, S::own, stage);
      commit_products();
      at<uint2>(S::slots + threadIdx.x * 8) = make_uint2(2 * u0, 2 * u1);
      if (DROPOUT && threadIdx.x < TILE) at<int>(S::column_hash + threadIdx.x * 4) = hash;
      wait_products<1>();
      fence_registers(table);
      store_table<COLUMN_STRIDE>(S::column_table, table);
      __syncthreads();
      wait_products<0>();
      fence_registers(s);

      add_positions<S>(s);
      const bool all = top.x <= first && bottom.x <= first && top.x + top.y >= first + TILE &&
                       bottom.x + bottom.y >= first + TILE;
      if (!__all_sync(0xFFFFFFFFu, all)) mask_scores(s, first, top, bottom);

      float new_top = max_top, new_bottom = max_bottom;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        new_top = fmaxf(new_top, fmaxf(s[n][0], s[n][1]));
        new_bottom = fmaxf(new_bottom, fmaxf(s[n][2], s[n][3]));
      }
#pragma unroll
      for (int i = 1; i < 4; i *= 2) {
        new_top = fmaxf(new_top, __shfl_xor_sync(0xFFFFFFFFu, new_top, i));
        new_bottom = fmaxf(new_bottom, __shfl_xor_sync(0xFFFFFFFFu, new_bottom, i));
      }
      const float base_top = new_top == -INF ? 0 : new_top * scale, base_bottom = new_bottom == -INF ? 0 : new_bottom * scale;
      const float shrink_top = ex2(fmaf(max_top, scale, -base_top)), shrink_bottom = ex2(fmaf(max_bottom, scale, -base_bottom));
      const bool same = __all_sync(0xFFFFFFFFu, new_top == max_top && new_bottom == max_bottom);
      max_top = new_top;
      max_bottom = new_bottom;
      sum_top *= shrink_top;
      sum_bottom *= shrink_bottom;
      if (!same) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
          out[n][0] *= shrink_top;
          out[n][1] *= shrink_top;
          out[n][2] *= shrink_bottom;
          out[n][3] *= shrink_bottom;
        }
      }
      u32 left[4][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float a = ex2(fmaf(s[n][0], scale, -base_top)), b = ex2(fmaf(s[n][1], scale, -base_top));
        float c = ex2(fmaf(s[n][2], scale, -base_bottom)), d = ex2(fmaf(s[n][3], scale, -base_bottom));
        sum_top += a + b;
        sum_bottom += c + d;
        if (DROPOUT) {
          int2 columns = at<int2>(S::column_hash + (n * 8 + t * 2) * 4);
          a = kept(hash_top, columns.x, p.threshold) ? a : 0;
          b = kept(hash_top, columns.y, p.threshold) ? b : 0;
          c = kept(hash_bottom, columns.x, p.threshold) ? c : 0;
          d = kept(hash_bottom, columns.y, p.threshold) ? d : 0;
        }
        left[n / 2][n % 2 * 2] = pack(a, b);
        left[n / 2][n % 2 * 2 + 1] = pack(c, d);
      }
      begin_products();
      add_product(out, left, stage + TILE_BYTES);
      commit_products();
      wait_products<0>();
      fence_registers(out);
      if (S::stages == 1 && tile + 1 < range.y) {
        __syncthreads();  // nobody needs these columns any more
        load_tile(stage, key, p.qk_token, first + TILE, p.length);
        load_tile(stage + TILE_BYTES, value, p.v_token, first + TILE, p.length);
        commit_copies();
      }
    }

#pragma unroll
    for (int i = 1; i < 4; i *= 2) {
      sum_top += __shfl_xor_sync(0xFFFFFFFFu, sum_top, i);
      sum_bottom += __shfl_xor_sync(0xFFFFFFFFu, sum_bottom, i);
    }
    if (t == 0) {  // +inf for rows without columns: their probabilities are then 0 in the backward
      if (row < p.length) p.lse[line + row] = sum_top > 0 ? max_top * scale + log2f(sum_top) : INF;
      if (row + 8 < p.length) p.lse[line + row + 8] = sum_bottom > 0 ? max_bottom * scale + log2f(sum_bottom) : INF;
    }
    wait_copies();
    __syncthreads();  // nobody needs the queries any more: their place takes the result
    stage_rows(S::own, out, sum_top > 0 ? p.keep_scale / sum_top : 0, sum_bottom > 0 ? p.keep_scale / sum_bottom : 0);
    store_rows(S::own, p.out + (i64)item.b * p.length * p.heads * D + h * D, p.heads * D, item.first, p.length);
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Backward. KEYS = false: rows are queries; gives dQ, the partial sums of dkey_pos, and delta = sum of dO * O.
// KEYS = true: rows are keys; gives dK, dV and the partial sums of dquery_pos.

template <bool KEYS>
__device__ __forceinline__ void backward(const Params &p) {
  using S = Shared<true>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
  const int h = blockIdx.x % p.heads, part = blockIdx.x / p.heads;
  const int items = p.batch * ((p.length + TILE - 1) / TILE), step = gridDim.x / p.heads;
  const float scale = p.scale * 1.4426950408889634f;
  const i64 plain_token = (i64)p.heads * D;  // of the context and its gradient, [B, T, H, D]
  load_positions(S::own_position, (KEYS ? p.query_pos : p.key_pos) + h * D, p, !KEYS);
  load_positions(S::column_position, (KEYS ? p.key_pos : p.query_pos) + h * D, p, !KEYS);
  for (int i = threadIdx.x; i < 4 * 16 * SKEW_STRIDE / 16; i += THREADS) at<uint4>(S::skew + i * 16) = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 8) at<int4>(S::groups + threadIdx.x * 16) = p.groups[threadIdx.x];
  float *partial = p.partial + (((i64)KEYS * p.heads + h) * p.parts + part) * TILE * D;

  Documents documents = load_documents(p, part, items);
  for (int number = part; number < items; number += step) {
    const Item item = item_of(p, number);
    const Columns allowed = columns_of<KEYS>(documents, item.first);
    const int2 range = allowed.tiles, top = allowed.top, bottom = allowed.bottom;
    const int row = item.first + warp * 16 + g;
    documents = load_documents(p, number + step, items);
    const u16 *query = p.query + item.b * p.qk_batch + h * D, *key = p.key + item.b * p.qk_batch + h * D;
    const u16 *value = p.value + item.b * p.v_batch + h * D;
    const u16 *dcontext = p.dcontext + item.b * p.length * plain_token + h * D;
    const i64 line = ((i64)item.b * p.heads + h) * p.length;
    const u16 *left_columns = KEYS ? query : key, *right_columns = KEYS ? dcontext : value;
    const i64 left_token = p.qk_token, right_token = KEYS ? plain_token : p.v_token;

    load_tile(S::own, KEYS ? key : query, p.qk_token, item.first, p.length);
    load_tile(S::own + TILE_BYTES, KEYS ? value : dcontext, KEYS ? p.v_token : plain_token, item.first, p.length);
    if (range.x < range.y) {
      load_tile(S::columns, left_columns, left_token, range.x * TILE, p.length);
      load_tile(S::columns + TILE_BYTES, right_columns, right_token, range.x * TILE, p.length);
    }
    commit_copies();

    int hash_top = 0, hash_bottom = 0;
    float lse_top = 0, lse_bottom = 0, delta_top = 0, delta_bottom = 0;
    if (DROPOUT) {
      const int *hashes = KEYS ? p.column_hash : p.row_hash + line;
      hash_top = row < p.length ? hashes[row] : 0;
      hash_bottom = row + 8 < p.length ? hashes[row + 8] : 0;
    }
    if (!KEYS) {
      lse_top = row < p.length ? p.lse[line + row] : INF;
      lse_bottom = row + 8 < p.length ? p.lse[line + row + 8] : INF;
      const u16 *context = p.context + item.b * p.length * plain_token + h * D;
#pragma unroll
      for (int i = 0; i < 16 * CHUNKS / 32; ++i) {  // this warp's 16 rows
        int index = i * 32 + lane, r = warp * 16 + index / CHUNKS, chunk = index % CHUNKS;
        float sum = 0;
        if (item.first + r < p.length) {
          i64 offset = (item.first + r) * plain_token + chunk * 8;
          uint4 x = *reinterpret_cast<const uint4 *>(context + offset);
          uint4 y = *reinterpret_cast<const uint4 *>(dcontext + offset);
          const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sum += __uint_as_float(xs[j] << 16) * __uint_as_float(ys[j] << 16);
            sum += __uint_as_float(xs[j] & 0xFFFF0000u) * __uint_as_float(ys[j] & 0xFFFF0000u);
          }
        }
#pragma unroll
        for (int j = 1; j < CHUNKS; j *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, j);
        if (chunk == 0) {
          at<float>(S::column_delta + r * 4) = sum;
          if (item.first + r < p.length) p.delta[line + item.first + r] = sum;
        }
      }
      __syncwarp();
      delta_top = at<float>(S::column_delta + (warp * 16 + g) * 4);
      delta_bottom = at<float>(S::column_delta + (warp * 16 + g + 8) * 4);
    }

    const u32 dtable = S::dtable + (warp * 16 + g) * DT_STRIDE * 4 + t * 8;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      at<float2>(dtable + n * 32) = make_float2(0, 0);
      at<float2>(dtable + n * 32 + 8 * DT_STRIDE * 4) = make_float2(0, 0);
    }
    float dleft[N_TILES][4], dright[KEYS ? N_TILES : 1][4];  // dQ | dK, and dV
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) dleft[n][0] = dleft[n][1] = dleft[n][2] = dleft[n][3] = 0;
#pragma unroll
    for (int n = 0; n < (KEYS ? N_TILES : 1); ++n) dright[n][0] = dright[n][1] = dright[n][2] = dright[n][3] = 0;

    for (int tile = range.x; tile < range.y; ++tile) {
      const int first = tile * TILE, stage = S::columns + ((tile - range.x) & (S::stages - 1)) * 2 * TILE_BYTES;
      const int e = first - item.first - 63 + (int)threadIdx.x;
      const int u0 = p.slots[e + p.padded], u1 = p.slots[min(e + 1, p.padded) + p.padded];
      int hash = 0;
      float lse = INF, delta = 0;
      if (threadIdx.x < TILE && first + threadIdx.x < p.length) {
        if (DROPOUT) hash = (KEYS ? p.row_hash + line : p.column_hash)[first + threadIdx.x];
        if (KEYS) {
          lse = p.lse[line + first + threadIdx.x];
          delta = p.delta[line + first + threadIdx.x];
        }
      }
      wait_copies();
      __syncthreads();
      if (S::stages == 2 && tile + 1 < range.y) {
        const int next = S::columns + ((tile - range.x + 1) & 1) * 2 * TILE_BYTES;
        load_tile(next, left_columns, left_token, first + TILE, p.length);
        load_tile(next + TILE_BYTES, right_columns, right_token, first + TILE, p.length);
        commit_copies();
      }
      float s[8][4], dp[8][4];
      begin_products();
      if (tile == range.x) {
        product_of_tiles(s, S::own, S::own_position);
        commit_products();
        wait_products<0>();
        fence_registers(s);
        store_table<OWN_STRIDE>(S::own_table, s);
        begin_products();
      }
      product_of_tiles(dp, stage, S::column_position);
      commit_products();
      product_of_tiles(s, S::own, stage);
      commit_products();
      at<uint2>(S::slots + threadIdx.x * 8) = make_uint2(2 * u0, 2 * u1);
      if (threadIdx.x < TILE) {
        if (DROPOUT) at<int>(S::column_hash + threadIdx.x * 4) = hash;
        if (KEYS) {
          at<float>(S::column_lse + threadIdx.x * 4) = lse;
          at<float>(S::column_delta + threadIdx.x * 4) = delta;
        }
      }
      wait_products<1>();
      fence_registers(dp);
      store_table<COLUMN_STRIDE>(S::column_table, dp);
      begin_products();
      product_of_tiles(dp, S::own + TILE_BYTES, stage + TILE_BYTES);
      commit_products();
      __syncthreads();
      wait_products<1>();
      fence_registers(s);

      add_positions<S>(s);
      const bool all = top.x <= first && bottom.x <= first && top.x + top.y >= first + TILE &&
                       bottom.x + bottom.y >= first + TILE;
      if (!__all_sync(0xFFFFFFFFu, all)) mask_scores(s, first, top, bottom);
      wait_products<0>();
      fence_registers(dp);

      u32 ds_left[4][4], p_left[4][4];
      const u32 skew = S::skew + warp * 16 * SKEW_STRIDE;
      const u32 skewed = skew + g * (SKEW_STRIDE - 2) + 4 * t + 30;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        int2 columns = make_int2(0, 0);
        if (DROPOUT) columns = at<int2>(S::column_hash + (n * 8 + t * 2) * 4);
        float2 lses = make_float2(0, 0), deltas = make_float2(0, 0);
        if (KEYS) {
          lses = at<float2>(S::column_lse + (n * 8 + t * 2) * 4);
          deltas = at<float2>(S::column_delta + (n * 8 + t * 2) * 4);
        }
        float probability[4], ds[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float l = KEYS ? (i & 1 ? lses.y : lses.x) : (i < 2 ? lse_top : lse_bottom);
          const float d = KEYS ? (i & 1 ? deltas.y : deltas.x) : (i < 2 ? delta_top : delta_bottom);
          probability[i] = ex2(fmaf(s[n][i], scale, -l));
          float weight = p.keep_scale, dropped = probability[i];
          if (DROPOUT && !kept(i < 2 ? hash_top : hash_bottom, i & 1 ? columns.y : columns.x, p.threshold)) {
            weight = 0;
            dropped = 0;
          }
          ds[i] = probability[i] * fmaf(dp[n][i], weight, -d);
          probability[i] = dropped;
        }
        if (KEYS) {
          p_left[n / 2][n % 2 * 2] = pack(probability[0], probability[1]);
          p_left[n / 2][n % 2 * 2 + 1] = pack(probability[2], probability[3]);
        }
        const u32 upper = pack(ds[0], ds[1]), lower = pack(ds[2], ds[3]);
        ds_left[n / 2][n % 2 * 2] = upper;
        ds_left[n / 2][n % 2 * 2 + 1] = lower;
        at<u16>(skewed + n * 16) = (u16)upper;
        at<u16>(skewed + n * 16 + 2) = (u16)(upper >> 16);
        at<u16>(skewed + n * 16 + 8 * (SKEW_STRIDE - 2)) = (u16)lower;
        at<u16>(skewed + n * 16 + 8 * (SKEW_STRIDE - 2) + 2) = (u16)(lower >> 16);
      }
      begin_products();
      if constexpr (KEYS) add_product(dright, p_left, stage + TILE_BYTES);
      add_product(dleft, ds_left, stage);
      commit_products();
      if (S::stages == 1 && tile + 1 < range.y) {
        wait_products<0>();
        __syncthreads();  // nobody needs these columns any more
        load_tile(stage, left_columns, left_token, first + TILE, p.length);
        load_tile(stage + TILE_BYTES, right_columns, right_token, first + TILE, p.length);
        commit_copies();
      }

      // dT += skewed dS @ one-hot. The skewed tile's distances are five steps of 16, from 16 * step0 + 1.
      __syncwarp();
      {
        const int step0 = (first - item.first) / 16 - warp - 1;
        const u32 window = S::slots + (48 - 16 * warp) * 8;
        const int group0 = at<u32>(window) >> 4, group1 = at<u32>(window + 78 * 8) >> 4;
        const u32 rows = shared_base() + skew + lane % 16 * SKEW_STRIDE + lane / 16 * 16 - step0 * 32;
        const uint2 *fragments = p.fragments + lane;
#pragma unroll 1
        for (int n = group0; n <= group1; ++n) {
          const int4 group = at<int4>(S::groups + n * 16);
          const int last = min(group.y, step0 + 4);
          int k = max(group.x, step0);
          const uint2 *fragment = fragments + (group.z + k) * 32;
          uint2 b = __ldg(fragment);  // there is one beyond the last, too
          float2 upper = at<float2>(dtable + n * 32), lower = at<float2>(dtable + n * 32 + 8 * DT_STRIDE * 4);
          float acc[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll 1
          for (; k <= last; ++k) {
            u32 a[4];
            ldmatrix(a, rows + k * 32);
            const uint2 now = b;
            b = __ldg(fragment += 32);
            mma(acc, a, now.x, now.y);
          }
          at<float2>(dtable + n * 32) = make_float2(acc[0], acc[1]);
          at<float2>(dtable + n * 32 + 8 * DT_STRIDE * 4) = make_float2(acc[2], acc[3]);
        }
      }
      __syncwarp();
      wait_products<0>();
      fence_registers(dleft);
      if constexpr (KEYS) fence_registers(dright);
    }

    // The tables' gradients go on to the rows (dT @ positions) and to the positions (dT^T @ rows).
    wait_copies();
    __syncthreads();
    u32 left[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 upper = at<float2>(dtable + n * 32), lower = at<float2>(dtable + n * 32 + 8 * DT_STRIDE * 4);
      left[n / 2][n % 2 * 2] = pack(upper.x, upper.y);
      left[n / 2][n % 2 * 2 + 1] = pack(lower.x, lower.y);
      const u32 place = S::columns + (warp * 16 + g) * 128 + ((n ^ g) & 7) * 16 + t * 4;
      at<u32>(place) = left[n / 2][n % 2 * 2];
      at<u32>(place + 8 * 128) = left[n / 2][n % 2 * 2 + 1];
    }
    begin_products();
    add_product(dleft, left, S::own_position);
    commit_products();
    wait_products<0>();
    fence_registers(dleft);
    __syncthreads();
    u16 *destination = (KEYS ? p.dkey : p.dquery) + item.b * p.dqk_batch + h * D;
    stage_rows(S::own + TILE_BYTES, dleft, p.scale, p.scale);
    store_rows(S::own + TILE_BYTES, destination, p.dqk_token, item.first, p.length);
    if constexpr (KEYS) {
      stage_rows(S::own + TILE_BYTES, dright, p.keep_scale, p.keep_scale);
      store_rows(S::own + TILE_BYTES, p.dvalue + item.b * p.length * plain_token + h * D, plain_token, item.first,
                 p.length);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ldmatrix_transposed(left[k], shared_base() + S::columns + (k * 16 + lane / 16 * 8 + lane % 8) * 128 +
                                       (((2 * warp + lane / 8 % 2) ^ lane) & 7) * 16);
    // dleft is free again: it takes the sums over rows, for slots warp * 16 + g (+ 8).
    float *place = partial + (warp * 16 + g) * D + 2 * t;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      float2 upper = make_float2(0, 0), lower = make_float2(0, 0);
      if (number != part) {
        upper = *reinterpret_cast<float2 *>(place + n * 8);
        lower = *reinterpret_cast<float2 *>(place + n * 8 + 8 * D);
      }
      dleft[n][0] = upper.x;
      dleft[n][1] = upper.y;
      dleft[n][2] = lower.x;
      dleft[n][3] = lower.y;
    }
    begin_products();
    add_product(dleft, left, S::own);
    commit_products();
    wait_products<0>();
    fence_registers(dleft);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      *reinterpret_cast<float2 *>(place + n * 8) = make_float2(dleft[n][0], dleft[n][1]);
      *reinterpret_cast<float2 *>(place + n * 8 + 8 * D) = make_float2(dleft[n][2], dleft[n][3]);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 64 ? 1 : 2)
    relative_attention_backward_queries(const __grid_constant__ Params p) {
  backward<false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 64 ? 1 : 2)
    relative_attention_backward_keys(const __grid_constant__ Params p) {
  backward<true>(p);
}

// dpositions [S, 2, H, D]: sums of the blocks' partial sums [2, H, parts, 64, D], in the order of the parts. The first
// of the two (of dkey_pos) is in the reverse order of slots.
extern "C" __global__ void __launch_bounds__(THREADS) relative_attention_reduce(const __grid_constant__ Params p) {
  const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (index >= (i64)2 * p.heads * p.n_slots * D) return;
  const int d = index % D, h = index / D % p.heads, which = index / D / p.heads % 2;
  const int slot = index / D / p.heads / 2;
  const int u = which == 1 ? p.n_slots - 1 - slot : slot;  // which 0: query positions, of keys as rows
  const float *source = p.partial + (((i64)(1 - which) * p.heads + h) * p.parts * TILE + u) * D + d;
  float sum = 0;
  for (int part = 0; part < p.parts; ++part) sum += source[(i64)part * TILE * D];
  p.dpositions[index] = (u16)pack(sum * p.scale, 0);
}
