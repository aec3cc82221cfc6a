/* te_format.h against a reference that knows only that a code is a sign and a magnitude: the magnitudes grow
 * with the code, so the nearest is found by bisection in double, which holds every value and midpoint
 * exactly. */
#include "te_format.h"
#include "test.h"

#include <math.h>
#include <stdlib.h>

typedef struct format {
  const char *name;
  int exponent_bits, mantissa_bits;
  float (*decode)(uint16_t);
  uint16_t (*encode)(float);
} format;

static const format bf16 = {"bf16", 8, 7, te_bf16_to_f32, te_f32_to_bf16};
static const format f16 = {"f16", 5, 10, te_f16_to_f32, te_f32_to_f16};

static uint16_t infinity_of(const format *f) {
  return (uint16_t)(((1 << f->exponent_bits) - 1) << f->mantissa_bits);
}

/* IEEE 754's definition, spelled out. */
static double value_of(const format *f, uint16_t code) {
  int exponent = (code & 0x7fff) >> f->mantissa_bits, mantissa = code & ((1 << f->mantissa_bits) - 1);
  int bias = (1 << (f->exponent_bits - 1)) - 1;
  double magnitude = exponent ? ldexp(1.0 + ldexp(mantissa, -f->mantissa_bits), exponent - bias)
                              : ldexp(mantissa, 1 - bias - f->mantissa_bits);
  return code & 0x8000 ? -magnitude : magnitude;
}

static uint16_t nearest(const format *f, float value) {
  uint16_t sign = signbit(value) ? 0x8000 : 0;
  double wanted = fabs((double)value);
  uint16_t low = 0, high = infinity_of(f); /* value(low) <= wanted < value(high) */
  if (isinf(value)) return sign | high;
  while (high - low > 1) {
    uint16_t middle = (uint16_t)((low + high) / 2);
    if (value_of(f, middle) <= wanted)
      low = middle;
    else
      high = middle;
  }
  /* "Infinity" rounds as if the exponents went on, which is what value_of() computes for its code. */
  double below = wanted - value_of(f, low), above = value_of(f, high) - wanted;
  bool up = below > above || (below == above && (low & 1));
  return sign | (up ? high : low);
}

static bool is_nan_code(const format *f, uint16_t code) { return (code & 0x7fff) > infinity_of(f); }

static void check_every_code(const format *f) {
  for (int c = 0; c < 65536; c++) {
    uint16_t code = (uint16_t)c;
    float value = f->decode(code);
    NOTE("%s code %04x", f->name, c);
    if (is_nan_code(f, code)) {
      CHECK(isnan(value));
      CHECK(!signbit(value) == !(c >> 15));
      /* The payload survives; a signalling NaN comes back quiet. */
      CHECK_INT(f->encode(value), code | 1 << (f->mantissa_bits - 1));
      continue;
    }
    if ((code & 0x7fff) == infinity_of(f))
      CHECK(isinf(value) && !signbit(value) == !(c >> 15));
    else
      CHECK((double)value == value_of(f, code) && !signbit(value) == !(c >> 15));
    CHECK_INT(f->encode(value), code);
  }
}

TEST(every_bf16_code) { check_every_code(&bf16); }
TEST(every_f16_code) { check_every_code(&f16); }

static void check_rounding(const format *f, uint32_t bits) {
  float value = te_bits_to_f32(bits);
  uint16_t got = f->encode(value);
  if (isnan(value)) {
    if (is_nan_code(f, got) && got >> 15 == bits >> 31) return;
    NOTE("%s of NaN %08x is %04x", f->name, bits, got);
    CHECK(is_nan_code(f, got));
    return;
  }
  uint16_t wanted = nearest(f, value);
  if (got == wanted) return;
  NOTE("%s of %08x = %a", f->name, bits, (double)value);
  CHECK_INT(got, wanted);
}

/* Where rounding decides: every code's value and its midpoint to the next, with their fp32 neighbours. */
static void check_around_every_code(const format *f) {
  for (int c = 0; c < infinity_of(f); c++) {
    double value = value_of(f, (uint16_t)c), next = value_of(f, (uint16_t)(c + 1));
    float places[2] = {(float)value, (float)((value + next) / 2)};
    for (int p = 0; p < 2; p++) {
      uint32_t bits = te_f32_to_bits(places[p]);
      for (int step = -2; step <= 2; step++) {
        if (step < 0 && bits < 2) continue;
        check_rounding(f, bits + (uint32_t)step);
        check_rounding(f, (bits + (uint32_t)step) | 0x80000000u);
      }
    }
  }
}

TEST(bf16_rounding_around_every_code) { check_around_every_code(&bf16); }
TEST(f16_rounding_around_every_code) { check_around_every_code(&f16); }

PROPERTY(random_rounding) {
  for (int i = 0; i < 200000; i++) {
    uint32_t bits = (uint32_t)rng_next(r);
    check_rounding(&bf16, bits);
    check_rounding(&f16, bits);
    /* Nearly all random exponents overflow or vanish in f16: also draw from around its range. */
    bits = (bits & 0x807fffffu) | (uint32_t)(100 + rng_below(r, 45)) << 23;
    check_rounding(&f16, bits);
  }
}

TEST(special_values) {
  static const struct {
    uint32_t f32;
    uint16_t bf16, f16;
  } rows[] = {
      {0x00000000, 0x0000, 0x0000}, {0x80000000, 0x8000, 0x8000}, /* the sign of zero */
      {0x7f800000, 0x7f80, 0x7c00}, {0xff800000, 0xff80, 0xfc00}, /* infinity */
      {0x7f7fffff, 0x7f80, 0x7c00}, {0xff7fffff, 0xff80, 0xfc00}, /* the largest fp32 overflows both */
      {0x7f7f7fff, 0x7f7f, 0x7c00}, {0x7f7f8000, 0x7f80, 0x7c00}, /* bf16's largest, and its midpoint to
                                                                     infinity */
      {0x477fe000, 0x4780, 0x7bff}, {0x477fefff, 0x4780, 0x7bff}, /* 65504 and just below 65520 */
      {0x477ff000, 0x4780, 0x7c00},                               /* 65520: a tie, to even, is infinity */
      {0x33800000, 0x3380, 0x0001}, {0x33000000, 0x3300, 0x0000}, /* 2^-24 and half of it: a tie to zero */
      {0x33000001, 0x3300, 0x0001}, {0x33c00000, 0x33c0, 0x0002}, /* just above the tie; 1.5 ulp goes to 2 */
      {0x387fc000, 0x3880, 0x03ff}, {0x387fe000, 0x3880, 0x0400}, /* largest subnormal; the midpoint to normal
                                                                   */
      {0x38800000, 0x3880, 0x0400},                               /* smallest normal of f16 */
      {0x00000001, 0x0000, 0x0000}, {0x00008001, 0x0001, 0x0000}, /* fp32's subnormals */
      {0x00008000, 0x0000, 0x0000}, {0x00018000, 0x0002, 0x0000}, /* and ties among them */
      {0x007fffff, 0x0080, 0x0000}, {0x3f800000, 0x3f80, 0x3c00}, {0x7f800001, 0x7fc0, 0x7e00},
      {0xffffffff, 0xffff, 0xffff}, /* NaN stays NaN though its payload is cut */
      {0x7fc00000, 0x7fc0, 0x7e00}, {0xffc00000, 0xffc0, 0xfe00},
  };
  for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++) {
    NOTE("fp32 bits %08x", rows[i].f32);
    CHECK_INT(te_f32_to_bf16(te_bits_to_f32(rows[i].f32)), rows[i].bf16);
    CHECK_INT(te_f32_to_f16(te_bits_to_f32(rows[i].f32)), rows[i].f16);
  }
}
