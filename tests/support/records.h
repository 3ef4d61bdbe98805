/* Describes the contents of chunk files as text, so that stores can be compared. */
#ifndef TESTS_SUPPORT_RECORDS_H
#define TESTS_SUPPORT_RECORDS_H

#include <ckptdelta.h>
#include <stddef.h>
#include <stdint.h>

#define RECORDS_LATEST 80 /* the largest step of the run "run", from 1 */

/*
 * Describes the records of the files of steps `first` to `latest`, in order. Ids are omitted, as they are
 * random.
 */
void records_describe(char *out, size_t room, ckd_store *store, const char *root, unsigned first,
                      unsigned latest);
/* Fails the test unless both texts are equal. Names the first record that differs. */
void records_check_same(const char *one, const char *several, uint32_t threads);

#endif
