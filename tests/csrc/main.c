/* Runs every TEST whose "file name" contains argv[1], or all. TE_OPS_TEST_SEED=<n> repeats a random run. */
#include "test.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_TESTS 512
#define MAX_REPORTS 20 /* per test: a broken property fails a million times */

static struct {
  const char *file, *name;
  void (*run)(void);
} tests[MAX_TESTS];
static int n_tests, n_failed_checks;
static uint64_t seed;
static char note[512];

uint64_t test_seed(void) { return seed; }

void test__register(const char *file, const char *name, void (*run)(void)) {
  if (n_tests == MAX_TESTS) abort();
  tests[n_tests].file = file;
  tests[n_tests].name = name;
  tests[n_tests++].run = run;
}

void test__note(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(note, sizeof note, format, args);
  va_end(args);
}

/* True if the failure, which has just been counted, is to be printed. */
static bool report(const char *file, int line) {
  if (n_failed_checks++ == MAX_REPORTS) printf("  ... (more failures of this test are not shown)\n");
  if (n_failed_checks > MAX_REPORTS) return false;
  printf("%s:%d: ", file, line);
  return true;
}

static void end_report(void) {
  if (note[0]) printf("    with %s\n", note);
}

void test__check(bool ok, const char *file, int line, const char *text) {
  if (ok || !report(file, line)) return;
  printf("failed: %s\n", text);
  end_report();
}

void test__check_int(int64_t a, int64_t b, const char *file, int line, const char *text) {
  if (a == b || !report(file, line)) return;
  printf("failed: %s\n    %" PRId64 " is not %" PRId64 "\n", text, a, b);
  end_report();
}

void test__check_str(const char *a, const char *b, const char *file, int line, const char *text) {
  if (strcmp(a, b) == 0 || !report(file, line)) return;
  printf("failed: %s\n    is       \"%s\"\n    expected \"%s\"\n", text, a, b);
  end_report();
}

void test__check_contains(const char *haystack, const char *needle, const char *file, int line) {
  if (strstr(haystack, needle) || !report(file, line)) return;
  printf("failed: \"%s\"\n    does not contain \"%s\"\n", haystack, needle);
  end_report();
}

int main(int argc, char **argv) {
  const char *filter = argc > 1 ? argv[1] : "", *wish = getenv("TE_OPS_TEST_SEED");
  int passed = 0, failed = 0;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  seed = wish ? strtoull(wish, NULL, 0) : (uint64_t)now.tv_sec * 1000003u + (uint64_t)now.tv_nsec;
  if (seed == 0) seed = 1;
  printf("random seed: TE_OPS_TEST_SEED=%" PRIu64 "\n", seed);
  for (int i = 0; i < n_tests; i++) {
    const char *slash = strrchr(tests[i].file, '/');
    char title[256];
    snprintf(title, sizeof title, "%s %s", slash ? slash + 1 : tests[i].file, tests[i].name);
    if (!strstr(title, filter)) continue;
    n_failed_checks = 0;
    note[0] = 0;
    tests[i].run();
    if (n_failed_checks) printf("FAILED: %s (%d checks)\n", title, n_failed_checks);
    if (n_failed_checks)
      failed++;
    else
      passed++;
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed || passed == 0;
}
