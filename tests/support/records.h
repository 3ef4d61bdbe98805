/* What chunk files hold, as text, so that stores can be compared. */
#ifndef TESTS_SUPPORT_RECORDS_H
#define TESTS_SUPPORT_RECORDS_H

#include <ckptdelta.h>
#include <stddef.h>
#include <stdint.h>

#define RECORDS_LATEST 80 /* steps at most, from 1 on, of the run "run" */

/* But for ids, which are random: records, in order. Files by their steps, from `first` on. */
void records_describe(char *out, size_t room, ckd_store *store, const char *root, unsigned first,
                      unsigned latest);
/* Fails, naming the record, unless both are the same. */
void records_check_same(const char *one, const char *several, uint32_t threads);

#endif
