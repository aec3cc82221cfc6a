/* A test harness in one header and main.c.
 *
 *   TEST(name) { CHECK_INT(1 + 1, 2); }
 *
 * A test registers itself before main() runs. A failed check prints file:line and marks the running test;
 * the test goes on, so that one run shows everything that is wrong. */
#ifndef TE_TEST_H
#define TE_TEST_H

#include <stdbool.h>
#include <stdint.h>

void test__register(const char *file, const char *name, void (*run)(void));
void test__check(bool ok, const char *file, int line, const char *text);
void test__check_int(int64_t a, int64_t b, const char *file, int line, const char *text);
void test__check_str(const char *a, const char *b, const char *file, int line, const char *text);
void test__check_contains(const char *haystack, const char *needle, const char *file, int line);
void test__note(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define TEST(name) \
  static void test_##name(void); \
  __attribute__((constructor)) static void register_##name(void) { \
    test__register(__FILE__, #name, test_##name); \
  } \
  static void test_##name(void)

#define CHECK(cond) test__check(cond, __FILE__, __LINE__, #cond)
#define CHECK_INT(a, b) test__check_int(a, b, __FILE__, __LINE__, #a " == " #b)
#define CHECK_STR(a, b) test__check_str(a, b, __FILE__, __LINE__, #a)
#define CHECK_CONTAINS(haystack, needle) test__check_contains(haystack, needle, __FILE__, __LINE__)

/* Printed once a check of the running test fails: what a property test was looking at. */
#define NOTE(...) test__note(__VA_ARGS__)

/* ---------------------------------------------------------------------------------- randomness -------- */

/* xorshift64*: the same numbers on every machine. */
typedef struct rng {
  uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r) {
  r->state ^= r->state >> 12;
  r->state ^= r->state << 25;
  r->state ^= r->state >> 27;
  return r->state * UINT64_C(2685821657736338717);
}

/* 0 .. n-1 */
static inline int64_t rng_below(rng *r, int64_t n) { return (int64_t)(rng_next(r) % (uint64_t)n); }

/* Property tests run once from a fixed seed and once from this one, which main() prints and which
 * TE_OPS_TEST_SEED sets. Never 0. */
uint64_t test_seed(void);

#define FIXED_SEED UINT64_C(20240229)

/* Defines a test that runs `body(rng *)` once from each of the two. */
#define PROPERTY(name) \
  static void property_##name(rng *r); \
  TEST(name) { \
    property_##name(&(rng){FIXED_SEED}); \
    property_##name(&(rng){test_seed()}); \
  } \
  static void property_##name(rng *r)

#endif
