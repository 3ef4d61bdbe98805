/* A temporary directory for a test. */
#ifndef TESTS_SUPPORT_TEMPDIR_H
#define TESTS_SUPPORT_TEMPDIR_H

/*
 * Creates an empty directory ckptdelta-test-XXXXXX below $TMPDIR, or /tmp. The path is absolute. Never NULL: without
 * it no test can go on, so that a failure says why and aborts. Release with tempdir_remove. Thread-safe.
 */
char *tempdir_create(void);

/*
 * Removes the directory and all below it, and frees the path; accepts NULL. Symbolic links are removed, never followed;
 * other file systems mounted below are left alone. A path that does not end like one of tempdir_create, or something
 * that cannot be removed, is a mistake of the test: it says so and aborts.
 */
void tempdir_remove(char *path);

/* Setup and teardown of a cmocka test: the state is the directory's path, and the teardown ends any faults. */
int tempdir_setup(void **state);
int tempdir_teardown(void **state);
/* The entry of a test that has such a directory. */
#define tempdir_test(test) cmocka_unit_test_setup_teardown(test, tempdir_setup, tempdir_teardown)

#endif
