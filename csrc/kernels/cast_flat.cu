/* Casts without a transposed copy, of tensors without gaps between rows: one long row. */
#include "cast_device.cuh"
#include "cast_line.cuh"

#define LINES \
  (TILE * TILE / (THREADS * SUB)) /* for each thread; a block makes as many codes as a tile has \
                                   */

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, IN == TE_f32 ? 2 : 4)
    cast_flat(const __grid_constant__ cast_jobs work) {
  typedef typename element<IN>::type T;
  place p = find_place(work);
  const te_cast &c = p.j.cast;
  int64_t n = c.x.rows * c.x.cols, first = (int64_t)p.block * TILE * TILE, whole = n / SUB * SUB;
  const T *from = (const T *)c.x.data;
  uint8_t *to = (uint8_t *)c.row;
  if (skips(c)) return;
  line<IN> in[LINES];
#pragma unroll
  for (int i = 0; i < LINES; i++) {
    int64_t at = first + (i * THREADS + (int)threadIdx.x) * SUB;
    in[i] = {};
    if (at < whole) in[i].load(from + at);
  }
  int64_t rest = whole + threadIdx.x; /* what no whole line holds */
  bool has_rest = p.block == p.j.blocks - 1 && rest < n;
  float last = has_rest ? to_f32<IN>(from[rest]) : 0.0f;
  wait_for_previous();
  uint32_t most = 0;
  if (c.record || !(c.scale || c.amax)) {
#pragma unroll
    for (int i = 0; i < LINES; i++) in[i].add_to(most);
  }
  float amax = amax_of(largest<IN>(most), last);
  p.scale = c.scale || c.amax ? scale_of(c) : scale_of_tile(c, amax);
#pragma unroll
  for (int i = 0; i < LINES; i++) {
    int64_t at = first + (i * THREADS + (int)threadIdx.x) * SUB;
    float x[SUB];
    in[i].values(x);
    if (at < whole) *global((uint2 *)(to + at)) = encode_line<E5M2>(x, p.scale);
  }
  if (has_rest) to[rest] = (uint8_t)encode2<E5M2>(last * p.scale, 0.0f);
  finish(p, amax);
}

cudaError_t te__cast_flat(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  TE_LAUNCH_CAST(cast_flat, work, blocks, chained, stream);
}
