#include "te_status.h"
#include "test.h"

#include <string.h>

TEST(first_message_wins) {
  te_status status = {0};
  CHECK_INT(te__fail(&status, "x[%d] = %s", 1, "seven"), TE_ERROR);
  CHECK_INT(status.code, TE_ERROR);
  CHECK_INT(te__fail(&status, "a consequence"), TE_ERROR);
  CHECK_STR(status.message, "x[1] = seven");
}

TEST(long_message_is_cut_and_terminated) {
  /* Guards on both sides: the message may not spill over. */
  struct {
    char before[16];
    te_status status;
    char after[16];
  } s;
  for (int length = TE_MESSAGE_SIZE - 3; length < TE_MESSAGE_SIZE + 3; length++) {
    memset(&s, 0x5a, sizeof s);
    s.status.code = TE_OK;
    char text[TE_MESSAGE_SIZE + 8];
    memset(text, 'm', sizeof text);
    text[length] = 0;
    te__fail(&s.status, "%s", text);
    size_t kept = strnlen(s.status.message, TE_MESSAGE_SIZE);
    CHECK_INT((int64_t)kept, length < TE_MESSAGE_SIZE ? length : TE_MESSAGE_SIZE - 1);
    CHECK(memcmp(text, s.status.message, kept) == 0);
    for (int i = 0; i < 16; i++) CHECK(s.before[i] == 0x5a && s.after[i] == 0x5a);
  }
}

static int tries(te_status *status, bool first, bool second, int *reached) {
  TE_REQUIRE(status, first, "first is %d", first);
  *reached = 1;
  TE_TRY(second ? TE_OK : te__fail(status, "second"));
  *reached = 2;
  return TE_OK;
}

TEST(try_and_require_return_at_the_failure) {
  int reached = 0;
  te_status status = {0};
  CHECK_INT(tries(&status, true, true, &reached), TE_OK);
  CHECK_INT(reached, 2);
  reached = 0;
  CHECK_INT(tries(&status, false, true, &reached), TE_ERROR);
  CHECK_INT(reached, 0);
  CHECK_STR(status.message, "first is 0");
  status = (te_status){0};
  CHECK_INT(tries(&status, true, false, &reached), TE_ERROR);
  CHECK_INT(reached, 1);
  CHECK_STR(status.message, "second");
}

TEST(a_failure_is_named_once) {
  te_status status = {0};
  te__name_failure(&status, "ns::op");
  CHECK_STR(status.message, "");
  te__fail(&status, "reason %d", 7);
  te__name_failure(&status, "ns::op");
  CHECK_STR(status.message, "ns::op: reason 7");
  te__name_failure(&status, "ns::op");
  CHECK_STR(status.message, "ns::op: reason 7");
}

TEST(naming_a_long_failure_cuts_its_end) {
  char text[TE_MESSAGE_SIZE], expected[TE_MESSAGE_SIZE + 16], name[TE_MESSAGE_SIZE + 1];
  for (size_t length = TE_MESSAGE_SIZE - 12; length < TE_MESSAGE_SIZE; length++) {
    te_status status = {0};
    memset(text, 'm', sizeof text);
    text[length] = 0;
    te__fail(&status, "%s", text);
    te__name_failure(&status, "ns::op");
    memcpy(expected, "ns::op: ", 8);
    memcpy(expected + 8, text, sizeof text);
    expected[TE_MESSAGE_SIZE - 1] = 0;
    CHECK_STR(status.message, expected);
  }
  te_status status = {0};
  te__fail(&status, "reason");
  memset(name, 'n', sizeof name);
  name[TE_MESSAGE_SIZE] = 0; /* no room for it: the message stays */
  te__name_failure(&status, name);
  CHECK_STR(status.message, "reason");
}
