/* The hosts of a job: lists and files that name them, which one is to blame, and what that excuses. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "supervise/internal.h"
#include "tests/support/tempdir.h"

/* ------------------------------------------------------------------------------------------------------- lists */

static void check_expanded(const char *written, const char *expected) {
    host_list list;
    ckd_error err;
    ckd_status status = hosts_expand(&list, written, &err);
    if (!expected) {
        assert_int_equal(status, CKD_E_INVALID);
        return;
    }
    assert_int_equal(status, CKD_OK);
    char *text = hosts_joined(&list, ' ');
    assert_string_equal(text, expected);
    free(text);
    hosts_free(&list);
}

static void test_lists_of_slurm(void **state) {
    (void)state;
    check_expanded("", "");
    check_expanded("a", "a");
    check_expanded("a,b,a", "a b");
    check_expanded("n[08-11]", "n08 n09 n10 n11");
    check_expanded("n[1-2,7,9-10],login", "n1 n2 n7 n9 n10 login");
    check_expanded("r[1-2]-n[01-02]-ib,x", "r1-n01-ib r1-n02-ib r2-n01-ib r2-n02-ib x");
    check_expanded("n[098-101].cluster", "n098.cluster n099.cluster n100.cluster n101.cluster");
    static const char *const wrong[] = {
        "n[",          "n]", "n[]", "n[1", "n[2-1]", "n[a-b]", "n[1-]",         "n[1,]",
        "n[[1]]",      "-o", "a b", "a;b", "(null)", "$(x)",   "n[0-99999999]", "n[1-99999999999999999999]",
        "n[0-8191],m", ",a"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        check_expanded(wrong[i], NULL);
    }
}

/* ------------------------------------------------------------------------------------------------------- files */

static void write_file(const char *path, const char *text) {
    FILE *to = fopen(path, "w");
    assert_non_null(to);
    fputs(text, to);
    fclose(to);
}

static void check_file(const char *path, const char *expected) {
    char text[1024];
    FILE *from = fopen(path, "r");
    assert_non_null(from);
    size_t n = fread(text, 1, sizeof(text) - 1, from);
    text[n] = '\0';
    fclose(from);
    assert_string_equal(text, expected);
}

static void test_files(void **state) {
    char path[256], link[256];
    snprintf(path, sizeof(path), "%s/hosts", (char *)*state);
    snprintf(link, sizeof(link), "%s/link", (char *)*state);
    write_file(path, "# of the job\na\n  b:8\n\nc slots=4 max_slots=8 # fast\r\nfe80::1 slots=2\na\n");
    chmod(path, 0640);
    assert_int_equal(symlink("hosts", link), 0);
    host_list list;
    ckd_error err;
    assert_int_equal(hosts_read(&list, path, &err), CKD_OK);
    char *text = hosts_joined(&list, ' ');
    assert_string_equal(text, "a b c fe80::1");
    free(text);
    hosts_free(&list);

    assert_int_equal(hosts_replace(link, "b", "s1", &err), CKD_OK);
    assert_int_equal(hosts_replace(link, "c", "s2", &err), CKD_OK);
    assert_int_equal(hosts_replace(link, "a", NULL, &err), CKD_OK);
    check_file(path, "# of the job\ns1:8\n\ns2 slots=4 max_slots=8 # fast\r\nfe80::1 slots=2\n");
    struct stat s;
    assert_int_equal(lstat(link, &s), 0);
    assert_true(S_ISLNK(s.st_mode));
    assert_int_equal(stat(path, &s), 0);
    assert_int_equal(s.st_mode & 0777, 0640);

    write_file(path, "a\n-oProxyCommand=x\n");
    assert_int_equal(hosts_read(&list, path, &err), CKD_E_INVALID);
    assert_int_equal(hosts_read(&list, "/nowhere/hosts", &err), CKD_E_IO);
    assert_int_equal(hosts_replace("/nowhere/hosts", "a", "b", &err), CKD_E_IO);
}

/* ------------------------------------------------------------------------------------------------------- blame */

static char words[32][64];

/* An attempt that has failed at step 10, from which it started. */
static attempt failed(size_t at, const char *hosts) {
    attempt a = {.from = "gpt@10",
                 .from_step = 10,
                 .first_step = 10,
                 .last_step = 10,
                 .end = ATTEMPT_EXITED,
                 .code = 1,
                 .status = -1,
                 .start_ns = SECOND,
                 .end_ns = 100 * SECOND};
    if (hosts) {
        snprintf(words[at], sizeof(words[at]), "%s", hosts);
        a.hosts = words[at];
    }
    return a;
}

static const char *blamed(const attempt *history, size_t count) {
    static char host[SUPERVISE_NAME_MAX];
    return decide_bad_host(host, history, count) ? host : "";
}

static void test_the_host_in_common_is_blamed(void **state) {
    (void)state;
    attempt h[] = {failed(0, "a b"), failed(1, "c b"), failed(2, "b d"), failed(3, "b d")};
    assert_string_equal(blamed(h, 2), ""); /* too few */
    assert_string_equal(blamed(h, 3), "b");
    assert_string_equal(blamed(h, 4), "b");
    h[1].stopped_by = SIGTERM; /* says nothing */
    assert_string_equal(blamed(h, 3), "");
    assert_string_equal(blamed(h, 4), "b");
    h[1].stopped_by = 0;
    h[1].last_step = 20; /* it was of use */
    assert_string_equal(blamed(h, 4), "");
    h[1].last_step = 10;
    h[2].status = 93;
    assert_string_equal(blamed(h, 4), "");
    h[2].status = -1;
    h[0].excluded = words[31]; /* what happened up to here is explained */
    assert_string_equal(blamed(h, 3), "");
    assert_string_equal(blamed(h, 4), "b");
}

static void test_nobody_is_blamed_without_a_difference(void **state) {
    (void)state;
    static const char *const sets[][3] = {
        {"a", "a", "a"},  {"a b", "a b", "a b"}, {"a b", "c d", "a b"}, {"a b", "a b", "a b c"},
        {"a", "ab", "a"}, {NULL, NULL, NULL},    {"a b", NULL, "a c"}};
    for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++) {
        attempt h[] = {failed(0, sets[i][0]), failed(1, sets[i][1]), failed(2, sets[i][2])};
        assert_string_equal(blamed(h, 3), "");
    }
}

/* ------------------------------------------------------------------------------------------------------ excuses */

static decision after(attempt *history, size_t count, bool elsewhere) {
    decide_rules rules = {.pause_s = 4, .max_pause_s = 30, .max_restarts = 100, .max_futile = 3};
    return decide(
        &rules,
        &(decide_facts){.history = history, .count = count, .started_here = count, .elsewhere = elsewhere});
}

/* It failed alike each time, but on other hosts since. Twice is enough. */
static void test_an_excluded_host_excuses_twice(void **state) {
    (void)state;
    attempt h[8];
    for (size_t i = 0; i < 8; i++) {
        h[i] = failed(i, "a b");
    }
    assert_int_equal(after(h, 2, false).status, 93);
    h[1].excluded = h[3].excluded = h[5].excluded = words[31];
    for (size_t count = 1; count <= 8; count++) {
        decision d = after(h, count, false);
        assert_int_equal(d.restart, count <= 5);
        assert_true(d.restart || (d.status == 93 && !d.requeue));
    }
    h[5].last_step = 20; /* progress begins anew */
    h[6].first_step = h[6].last_step = h[7].first_step = h[7].last_step = 20;
    h[6].excluded = words[31];
    assert_true(after(h, 7, false).restart);
}

static void test_when_a_requeue_helps(void **state) {
    (void)state;
    attempt h[] = {failed(0, "a b"), failed(1, "a b"), failed(2, "a b")};
    snprintf(words[31], sizeof(words[31]), "b");
    h[1].excluded = words[31];
    decision d = after(h, 2, true);
    assert_true(!d.restart && d.status == 1 && d.requeue);
    assert_non_null(strstr(d.reason, "exit status 1; without b"));
    h[1].last_step = 20; /* it goes on where it is */
    assert_true(after(h, 2, true).restart);
    h[1].last_step = 10;
    h[1].stopped_by = SIGTERM;
    d = after(h, 2, true);
    assert_true(d.status == 128 + SIGTERM && d.requeue);
    h[1].stopped_by = SIGINT;
    assert_false(after(h, 2, true).requeue);
    h[1] = failed(1, "a b");
    d = after(h, 2, true);
    assert_true(d.status == 93 && !d.requeue);
    h[1].code = 0;
    d = after(h, 2, true);
    assert_true(d.status == 0 && !d.requeue);
    h[1].code = 1;
    d = decide(&(decide_rules){.max_futile = 9, .max_restarts = 1},
               &(decide_facts){.history = h, .count = 1, .started_here = 2});
    assert_true(d.status == 1 && d.requeue);
    d = decide(&(decide_rules){.max_futile = 9, .max_restarts = 9},
               &(decide_facts){.history = h, .count = 1, .started_here = 2, .disk_full = true});
    assert_true(d.status == 1 && !d.requeue);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists_of_slurm),
        tempdir_test(test_files),
        cmocka_unit_test(test_the_host_in_common_is_blamed),
        cmocka_unit_test(test_nobody_is_blamed_without_a_difference),
        cmocka_unit_test(test_an_excluded_host_excuses_twice),
        cmocka_unit_test(test_when_a_requeue_helps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
