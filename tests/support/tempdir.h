/* A temporary directory for a test. */
#ifndef TESTS_SUPPORT_TEMPDIR_H
#define TESTS_SUPPORT_TEMPDIR_H

/*
 * Creates an empty directory ckptdelta-test-XXXXXX below $TMPDIR, or /tmp. The path is absolute, and never
 * NULL: on failure the function prints why and aborts, as no test can run without it. Release with
 * tempdir_remove. Thread-safe.
 */
char *tempdir_create(void);

/*
 * Removes the directory and everything below it, and frees the path; accepts NULL. Symbolic links are
 * removed, never followed. Other file systems mounted below are left alone. A path that does not end like one
 * of tempdir_create, or a file that cannot be removed, is a mistake of the test: the function prints it and
 * aborts.
 */
void tempdir_remove(char *path);

/*
 * Setup and teardown of a cmocka test. The state is the directory's path. The teardown also removes any fault
 * hook. It fails if a lock of a store in the directory is still held.
 */
int tempdir_setup(void **state);
int tempdir_teardown(void **state);
/* A test in a list of cmocka with such a directory. */
#define tempdir_test(test) cmocka_unit_test_setup_teardown(test, tempdir_setup, tempdir_teardown)

#endif
