#include "plan_cuda.h"

#include <pthread.h>
#include <string.h>

/* Set-associative, least recently used within a set: bounded, no allocation, a few nanoseconds. */
#define SETS 256
#define WAYS 4

typedef struct slot {
  te_plan_key key;
  te_plan plan;
  uint64_t last_use; /* 0: empty */
} slot;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static slot slots[SETS][WAYS];
static uint64_t now;
static te_gemm_cache_info stats = {.capacity = SETS * WAYS};

static slot *set_of(const te_plan_key *key) {
  uint64_t words[sizeof *key / 8], hash = 0x9e3779b97f4a7c15u;
  _Static_assert(sizeof words == sizeof(te_plan_key), "keys are hashed by 8 bytes");
  memcpy(words, key, sizeof words);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    hash = (hash ^ words[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return slots[hash % SETS];
}

bool te__plan_find(const te_plan_key *key, te_plan *out) {
  bool found = false;
  pthread_mutex_lock(&lock);
  slot *set = set_of(key);
  for (int i = 0; i < WAYS && !found; i++) {
    if (!set[i].last_use || memcmp(&set[i].key, key, sizeof *key) != 0) continue;
    set[i].last_use = ++now;
    *out = set[i].plan;
    found = true;
  }
  if (found)
    stats.hits++;
  else
    stats.misses++;
  pthread_mutex_unlock(&lock);
  return found;
}

void te__plan_store(const te_plan_key *key, const te_plan *plan) {
  pthread_mutex_lock(&lock);
  slot *set = set_of(key), *victim = set;
  for (int i = 0; i < WAYS; i++) {
    if (set[i].last_use && memcmp(&set[i].key, key, sizeof *key) == 0) {
      victim = &set[i]; /* another thread planned the same problem meanwhile */
      break;
    }
    if (set[i].last_use < victim->last_use) victim = &set[i];
  }
  if (!victim->last_use) stats.size++;
  *victim = (slot){*key, *plan, ++now};
  pthread_mutex_unlock(&lock);
}

te_gemm_cache_info te__gemm_cache_info(void) {
  pthread_mutex_lock(&lock);
  te_gemm_cache_info info = stats;
  pthread_mutex_unlock(&lock);
  return info;
}
