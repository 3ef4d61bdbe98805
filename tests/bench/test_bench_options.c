/* bench/support's table of options: where values go, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "bench/support/support.h"

typedef struct values {
    const char *text;
    int number, flag;
    uint64_t count;
    double real;
    ckd_fidelity fidelity;
} values;

static void parse(values *v, int argc, const char *const *argv) {
    const bench_option known[] = {{"--text", .text = &v->text},
                                  {"--number", .number = &v->number, .least = 1, .most = 9},
                                  {"--count", .count = &v->count, .least = 0, .most = UINT64_C(1) << 40},
                                  {"--real", .real = &v->real},
                                  {"--fidelity", .fidelity = &v->fidelity},
                                  {"--flag", .flag = &v->flag}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, (char **)argv);
}

static void values_reach_their_places(void **state) {
    (void)state;
    values v = {.number = 5};
    const char *all[] = {"bench",  "--text", "a b",        "--count", "1099511627776",
                         "--real", "2.5",    "--fidelity", "near",    "--flag"};
    parse(&v, 10, all);
    assert_string_equal(v.text, "a b");
    assert_true(v.count == UINT64_C(1) << 40 && v.real > 2.4 && v.real < 2.6);
    assert_int_equal(v.fidelity, CKD_NEAR);
    assert_int_equal(v.flag, 1);
    assert_int_equal(v.number, 5); /* not named: its default */
    const char *last[] = {"bench", "--number", "9", "--number", "1"};
    parse(&v, 5, last);
    assert_int_equal(v.number, 1);
}

/* The exit status of a program with this option. */
static int status_of(const char *name, const char *value) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        values v = {0};
        const char *argv[] = {"bench", name, value};
        if (!freopen("/dev/null", "w", stderr)) {
            _exit(1);
        }
        parse(&v, value ? 3 : 2, argv);
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    static const char *const wrong[][2] = {{"--unknown", "1"}, {"--number", NULL}, {"--number", "0"},
                                           {"--number", "10"}, {"--number", "2x"}, {"--number", ""},
                                           {"--count", "-1"},  {"--real", "x"},    {"--fidelity", "raw"},
                                           {"--flag", "1"},    {"text", NULL}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(status_of(wrong[i][0], wrong[i][1]), 2);
    }
    assert_int_equal(status_of("--number", "9"), 0);
    assert_int_equal(status_of("--count", "0"), 0);
    assert_int_equal(status_of("--flag", NULL), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(values_reach_their_places),
                                       cmocka_unit_test(wrong_options_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
