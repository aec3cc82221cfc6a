/* Activations and their gradients, gated or not.
 *
 * Floor, in elements for each of y: forward 1 read (gated 2) and 1 write; backward 2 reads (3) and 1 write
 * (2). */
#include "row_vector.cuh"

#include "../te_activation.h"
#include "te_activation_kernels.h"

#define THREADS 256

/* y, or dx; and of the gate, too. */
__device__ __forceinline__ void apply(const te_activation_pass &p, float x, float gate_x, float dy,
                                      float &out, float &gate_out) {
  te_slope f = te_activate(&p.activation, x), gate = {1, 0};
  if (p.gated) gate = te_gate(&p.activation, gate_x);
  out = p.dy ? dy * gate.value * f.slope : f.value * gate.value;
  gate_out = dy * f.value * gate.slope;
}

/* ALIGNED: a thread has 16 bytes of a row of y, else one element. */
template <te_dtype IN, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) activation(const __grid_constant__ te_activation_pass p) {
  typedef typename element<IN>::type T;
  constexpr int size = ALIGNED ? row_vector<IN>::size : 1;
  int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, per_row = p.cols / size, row = i / per_row;
  if (row >= p.rows) return;
  int64_t in_dy = i * size, in_x = p.gated ? in_dy + row * p.cols : in_dy, in_gate = in_x + p.cols;
  const T *x = (const T *)p.x, *dy = (const T *)p.dy;
  T *out = (T *)p.out;
  if constexpr (ALIGNED) {
    row_vector<IN> a, g = {}, d = {};
    float av[size], gv[size], dv[size], result[size], gate_result[size];
    a.raw = *(const uint4 *)(x + in_x);
    if (p.gated) g.raw = *(const uint4 *)(x + in_gate);
    if (dy) d.raw = *(const uint4 *)(dy + in_dy);
    a.values(av);
    g.values(gv);
    d.values(dv);
#pragma unroll
    for (int k = 0; k < size; k++) apply(p, av[k], gv[k], dv[k], result[k], gate_result[k]);
    a.set(result);
    g.set(gate_result);
    *(uint4 *)(out + (dy ? in_x : in_dy)) = a.raw;
    if (dy && p.gated) *(uint4 *)(out + in_gate) = g.raw;
  } else {
    float result, gate_result;
    apply(p, to_f32<IN>(x[in_x]), p.gated ? to_f32<IN>(x[in_gate]) : 0.0f, dy ? to_f32<IN>(dy[in_dy]) : 0.0f,
          result, gate_result);
    store_element<IN>(out, dy ? in_x : in_dy, result);
    if (dy && p.gated) store_element<IN>(out, in_gate, gate_result);
  }
}

template <te_dtype IN> static cudaError_t run(const te_activation_pass *p, cudaStream_t stream) {
  int64_t size = row_vector<IN>::size;
  bool aligned = p->cols % size == 0 && ((uintptr_t)p->x | (uintptr_t)p->dy | (uintptr_t)p->out) % 16 == 0;
  int64_t threads = p->rows * (aligned ? p->cols / size : p->cols);
  return launch(aligned ? activation<IN, true> : activation<IN, false>, (threads + THREADS - 1) / THREADS,
                THREADS, false, stream, *p);
}

extern "C" cudaError_t te__activation(const te_activation_pass *pass, cudaStream_t stream) {
  switch (pass->dtype) {
  case TE_bf16:
    return run<TE_bf16>(pass, stream);
  case TE_f16:
    return run<TE_f16>(pass, stream);
  case TE_f32:
    return run<TE_f32>(pass, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
