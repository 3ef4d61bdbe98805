/*
 * Parts of the command that need no store: formatting of numbers, option values, roles, progress, output
 * files.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "cli/commands/damage.h"
#include "cli/output/output.h"
#include "cli/files/files.h"

#define SECOND UINT64_C(1000000000)

static void test_sizes(void **state) {
    (void)state;
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {1023, "1023 B"},
        {1024, "1.0 KiB"},
        {1536, "1.5 KiB"},
        {1048524, "1023.9 KiB"},
        {1048575, "1.0 MiB"},
        {12897485, "12.3 MiB"},
        {UINT64_C(1) << 40, "1.0 TiB"},
        {UINT64_MAX, "16.0 EiB"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(cli_text_size(cases[i].bytes).text, cases[i].text);
}

static void test_other_figures(void **state) {
    (void)state;
    assert_string_equal(cli_text_ratio(131, 100).text, "1.31x");
    assert_string_equal(cli_text_ratio(123456, 1000).text, "123x");
    assert_string_equal(cli_text_ratio(0, 100).text, "-");
    assert_string_equal(cli_text_ratio(100, 0).text, "-");
    assert_string_equal(cli_text_duration(0.4).text, "0 s");
    assert_string_equal(cli_text_duration(59.4).text, "59 s");
    assert_string_equal(cli_text_duration(59.6).text, "1 min 0 s");
    assert_string_equal(cli_text_duration(3725).text, "1 h 2 min");
    assert_string_equal(cli_text_duration(9999 * 24 * 3600.0).text, "9999 days");
    assert_string_equal(cli_text_duration(INFINITY).text, "long");
    assert_string_equal(cli_text_duration(NAN).text, "long");
    assert_string_equal(cli_text_time(0).text, "1970-01-01T00:00:00Z");
    assert_string_equal(cli_text_time(UINT64_C(1709210096) * SECOND + 999999999).text,
                        "2024-02-29T12:34:56Z");
    assert_string_equal(cli_text_number(NAN).text, "-");
    assert_string_equal(cli_text_number(1.25e-7).text, "1.25e-07");
}

/* A tensor's name may have an escape sequence, which must not reach the terminal. */
static void test_control_characters_are_shown(void **state) {
    (void)state;
    static const struct {
        const char *text, *clean;
    } cases[] = {
        {"plain \xc3\xa9 \xe2\x82\xac", "plain \xc3\xa9 \xe2\x82\xac"},
        {"\x1b[31mred\n\t\x7f", "\\x1b[31mred\\x0a\\x09\\x7f"},
        {"\xc2\x9b"
         "2J \xc2\xa0",
         "\\xc2\\x9b2J \xc2\xa0"},
        {"\xe2\x80\xaeRTL \xe2\x80\xa8 \xe2\x81\xa6", "\\xe2\\x80\\xaeRTL \\xe2\\x80\\xa8 \\xe2\\x81\\xa6"},
        {"a\xe2\x80\x8b\xef\xbb\xbf\xd8\x9c\xc2\xad", "a\\xe2\\x80\\x8b\\xef\\xbb\\xbf\\xd8\\x9c\\xc2\\xad"},
        {"\xf3\xa0\x81\x81", "\\xf3\\xa0\\x81\\x81"},
        {"\xd7\x90 \xf0\x9f\x98\x80", "\xd7\x90 \xf0\x9f\x98\x80"},
        {"\x9b"
         "31m \xe2\x80",
         "\\x9b31m \\xe2\\x80"}, /* invalid UTF-8 */
        {"\xc0\x9b \xed\xa0\x80 \xf4\x90\x80\x80", "\\xc0\\x9b \\xed\\xa0\\x80 \\xf4\\x90\\x80\\x80"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *clean = cli_clean_copy(cases[i].text);
        assert_string_equal(clean, cases[i].clean);
        free(clean);
    }
    assert_int_equal(cli_text_width("\xc3\xa9\xe2\x82\xac"
                                    "a"),
                     3);
}

/* The exit statuses of docs/cli.md. */
static void test_exit_statuses(void **state) {
    (void)state;
    static const struct {
        ckd_error err;
        int code;
    } cases[] = {
        {{.status = CKD_OK}, 0},
        {{.status = CKD_E_INVALID}, 2},
        {{.status = CKD_E_NOT_FOUND}, 3},
        {{.status = CKD_E_CORRUPT}, 4},
        {{.status = CKD_E_UNSUPPORTED, .file = "data/m/a.1.0"}, 4}, /* of a newer version */
        {{.status = CKD_E_UNSUPPORTED}, 1},                         /* for example a missing library */
        {{.status = CKD_E_IO}, 1},
        {{.status = CKD_E_BUSY}, 1},
        {{.status = CKD_E_NOSPACE}, 1},
        {{.status = CKD_E_EXISTS}, 1},
        {{.status = CKD_E_STATE}, 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(cli_exit_code(&cases[i].err), cases[i].code);
    }
}

/*
 * Checkpoints that a compaction left: any damage changes the exit status. Checkpoints deleted meanwhile do
 * not.
 */
static void test_damage_of_skipped_checkpoints(void **state) {
    (void)state;
    static const struct {
        ckd_error left;
        ckd_status status;
    } cases[] = {
        {{.status = CKD_OK}, CKD_OK},
        {{.status = CKD_E_CORRUPT, .message = "x"}, CKD_E_CORRUPT},
        {{.status = CKD_E_IO, .sys_errno = EIO, .message = "x"}, CKD_E_CORRUPT},
        {{.status = CKD_E_IO, .sys_errno = EACCES, .message = "x"}, CKD_E_CORRUPT},
        {{.status = CKD_E_NOT_FOUND, .file = "data/c/a.ckd", .message = "x"}, CKD_E_CORRUPT},
        {{.status = CKD_E_NOT_FOUND, .message = "x"}, CKD_OK},
        {{.status = CKD_E_EXISTS, .message = "x"}, CKD_OK},
        {{.status = CKD_E_IO, .sys_errno = EMFILE, .message = "x"}, CKD_OK},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckd_error err = {0};
        assert_int_equal(cli_skip_is_damage(&cases[i].left, &err), cases[i].status);
        assert_int_equal(err.status, cases[i].status);
        assert_string_equal(err.message, cases[i].status == CKD_OK ? "" : "x");
    }
}

static void test_numbers(void **state) {
    (void)state;
    uint64_t number;
    double real;
    assert_true(cli_parse_u64(&number, "18446744073709551615"));
    assert_true(number == UINT64_MAX);
    static const char *const bad[] = {"",   "-1", "+1", " 1", "1 ", "0x10", "1e3", "18446744073709551616",
                                      "1.0"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(cli_parse_u64(&number, bad[i]));
    assert_true(cli_parse_double(&real, "-2.5e-3"));
    assert_true(real == -2.5e-3);
    static const char *const bad_reals[] = {"", "x", "1x", "nan", "inf", "1e999"};
    for (size_t i = 0; i < sizeof(bad_reals) / sizeof(bad_reals[0]); i++)
        assert_false(cli_parse_double(&real, bad_reals[i]));
}

static void test_checkpoint_names(void **state) {
    (void)state;
    cli_ref place;
    assert_true(cli_parse_ref(&place, "gpt~2@100"));
    assert_string_equal(place.run, "gpt~2");
    assert_int_equal(place.step, 100);
    assert_true(cli_parse_ref(&place, "latest"));
    assert_string_equal(place.run, "");
    assert_true(place.step == CKD_LATEST);
    assert_true(cli_parse_ref(&place, "a@latest"));
    assert_true(place.step == CKD_LATEST);
    static const char *const bad[] = {"", "@", "a@", "a@-1", "a", "a@9223372036854775808", "a@newest"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(cli_parse_ref(&place, bad[i]));
    char longest[CKD_RUN_MAX + 4];
    memset(longest, 'r', sizeof(longest));
    strcpy(longest + CKD_RUN_MAX, "@1");
    assert_true(cli_parse_ref(&place, longest));
    strcpy(longest + CKD_RUN_MAX, "r@1");
    assert_false(cli_parse_ref(&place, longest));
}

static void test_roles(void **state) {
    (void)state;
    cli_roles roles = {0};
    ckd_error err;
    assert_int_equal(cli_roles_add(&roles, "ema.*=other", &err), CKD_OK);
    assert_int_equal(cli_roles_add(&roles, "*.a=b=master", &err), CKD_OK);
    assert_int_equal(cli_roles_add(&roles, "ema.x=weight", &err), CKD_OK);
    assert_int_equal(cli_roles_given(&roles, "ema.x"), CKD_ROLE_OTHER);
    assert_int_equal(cli_roles_given(&roles, "deep/er.a=b"), CKD_ROLE_MASTER);
    assert_int_equal(cli_roles_given(&roles, "w"), CKD_ROLE_AUTO);
    assert_true(roles.rules[0].used && roles.rules[1].used && !roles.rules[2].used);
    static const char *const bad[] = {"", "x", "=weight", "x=", "x=auto", "x=Weight"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(cli_roles_add(&roles, bad[i], &err), CKD_E_INVALID);
    assert_int_equal(roles.count, 3);
    cli_roles_free(&roles);
}

/* ----------------------------------------------------------------------------------------------------- regions */

typedef struct counted {
    uint64_t next, most, slices, until;
} counted;

/* Checks that the slices of a box in a tensor of 5 x 7 x 9 come in order and without gaps. */
static ckd_status count_slice(void *context, const ckd_region *slice, uint64_t elements, ckd_error *err) {
    counted *c = context;
    uint64_t first = slice->offsets[0] * 20 + (slice->offsets[1] - 2) * 4 + (slice->offsets[2] - 3);
    assert_int_equal(slice->kind, CKD_REGION_BOX);
    assert_int_equal(first, c->next);
    assert_int_equal(elements, slice->lengths[0] * slice->lengths[1] * slice->lengths[2]);
    assert_true(elements <= c->most || elements == 1);
    c->next += elements;
    return ++c->slices == c->until ? cli_error(err, CKD_E_IO, "enough") : CKD_OK;
}

static void test_boxes_in_slices(void **state) {
    (void)state;
    ckd_region box = {.kind = CKD_REGION_BOX, .offsets = {0, 2, 3}, .lengths = {5, 5, 4}};
    static const uint64_t most[] = {0, 1, 3, 4, 7, 19, 20, 45, 99, 100, 1000};
    static const uint64_t slices[] = {100, 100, 50, 25, 25, 10, 5, 3, 2, 1, 1};
    ckd_error err;
    for (size_t i = 0; i < sizeof(most) / sizeof(most[0]); i++) {
        counted c = {.most = most[i]};
        assert_int_equal(cli_cut_box(&box, 3, most[i], count_slice, &c, &err), CKD_OK);
        assert_int_equal(c.next, 100);
        assert_int_equal(c.slices, slices[i]);
    }
    counted c = {.most = 4, .until = 3};
    assert_int_equal(cli_cut_box(&box, 3, 4, count_slice, &c, &err), CKD_E_IO);
    assert_int_equal(c.slices, 3);
    box.lengths[1] = 0;
    c = (counted){.most = 4};
    assert_int_equal(cli_cut_box(&box, 3, 4, count_slice, &c, &err), CKD_OK);
    assert_int_equal(c.slices, 0);
}

static void test_shards_and_regions(void **state) {
    (void)state;
    cli_regions r = {0};
    ckd_error err;
    static const char *const bad_shards[] = {"", "1", "4/4", "/4", "1/", "-1/4", "1/4/2", "0/0", "a/b"};
    for (size_t i = 0; i < sizeof(bad_shards) / sizeof(bad_shards[0]); i++)
        assert_int_equal(cli_regions_set_shard(&r, bad_shards[i], &err), CKD_E_INVALID);
    static const char *const bad[] = {
        "",         "x",        "x=",       "=[1:2]",  "x=[1]",     "x=[1:2",   "x=[2:1]",
        "x=[1:2,]", "x=[,1:2]", "x=[1:2] ", "x=[a:b]", "x=[1:2:3]", "x=[-1:2]", "x=[1:99999999999999999999]"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(cli_regions_add(&r, bad[i], &err), CKD_E_INVALID);
    assert_int_equal(cli_regions_set_dim(&r, "16", &err), CKD_E_INVALID);
    assert_int_equal(cli_regions_set_dim(&r, "-17", &err), CKD_E_INVALID);
    assert_int_equal(cli_regions_set_dim(&r, "-0", &err), CKD_E_INVALID);
    assert_int_equal(cli_regions_set_dim(&r, "-", &err), CKD_E_INVALID);
    assert_int_equal(r.count + r.shards, 0);
    assert_int_equal(cli_regions_add(&r, "odd=[1:2]=[1:,:3]", &err), CKD_OK);
    assert_int_equal(cli_regions_add(&r, "odd=[1:2]=[:]", &err), CKD_E_INVALID);
    assert_string_equal(r.items[0].tensor, "odd=[1:2]");
    ckd_tensor_info info = {.name = "odd=[1:2]", .ndim = 3, .shape = {4, 5, 6}};
    ckd_region region;
    uint64_t lengths[CKD_MAX_DIMS];
    assert_int_equal(cli_regions_find(&region, lengths, &r, &info, &err), CKD_OK);
    assert_int_equal(region.offsets[0] * 100 + region.offsets[1] * 10 + region.offsets[2], 100);
    assert_int_equal(lengths[0] * 100 + lengths[1] * 10 + lengths[2], 336);
    info.shape[1] = 2;
    assert_int_equal(cli_regions_find(&region, lengths, &r, &info, &err), CKD_E_INVALID);
    assert_string_equal(err.tensor, info.name);
    info.ndim = 1;
    assert_int_equal(cli_regions_find(&region, lengths, &r, &info, &err), CKD_E_INVALID);
    cli_regions_free(&r);
}

/* Shards are those of torch.chunk: 10 by 4 are 3, 3, 3, 1; 9 by 4 are 3, 3, 3, 0; 1 by 3 are 1, 0, 0. */
static void test_shards_are_chunks(void **state) {
    (void)state;
    static const uint64_t cases[][6] = {
        {10, 4, 3, 3, 3, 1}, {9, 4, 3, 3, 3, 0}, {1, 3, 1, 0, 0}, {0, 2, 0, 0}, {5, 1, 5}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint64_t at = 0, lengths[CKD_MAX_DIMS];
        cli_regions r = {.shards = cases[i][1], .dim = 1};
        ckd_tensor_info info = {.name = "x", .ndim = 2, .shape = {7, cases[i][0]}};
        ckd_region region;
        ckd_error err;
        for (; r.shard < r.shards; r.shard++) {
            assert_int_equal(cli_regions_find(&region, lengths, &r, &info, &err), CKD_OK);
            assert_int_equal(region.offsets[1], at);
            assert_int_equal(region.lengths[1], cases[i][2 + r.shard]);
            assert_int_equal(lengths[0], 7);
            at += region.lengths[1];
        }
        info.ndim = 1;
        assert_int_equal(cli_regions_find(&region, lengths, &r, &info, &err), CKD_OK);
        assert_int_equal(lengths[0], 7);
    }
}

static void test_dimensions_count_from_both_ends(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint32_t of_3, of_16, of_0;
    } cases[] = {{"0", 0, 0, 16},   {"2", 2, 2, 16},   {"3", 16, 3, 16},   {"15", 16, 15, 16},
                 {"-1", 2, 15, 16}, {"-3", 0, 13, 16}, {"-4", 16, 12, 16}, {"-16", 16, 0, 16}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int32_t dim;
        assert_true(cli_parse_dim(&dim, cases[i].text));
        assert_int_equal(cli_dim_of(dim, 3), cases[i].of_3);
        assert_int_equal(cli_dim_of(dim, 16), cases[i].of_16);
        assert_int_equal(cli_dim_of(dim, 0), cases[i].of_0);
    }
}

/* ---------------------------------------------------------------------------------------------------- progress */

static void test_progress_is_drawn_rarely(void **state) {
    (void)state;
    cli_progress p = {.verb = "saving", .enabled = true, .started_ns = 5 * SECOND};
    assert_false(cli_progress_due(&p, 6 * SECOND - 1));
    assert_true(cli_progress_due(&p, 6 * SECOND));
    p.drawn = true;
    p.drawn_ns = 6 * SECOND;
    assert_false(cli_progress_due(&p, 6 * SECOND + SECOND / 5 - 1));
    assert_true(cli_progress_due(&p, 6 * SECOND + SECOND / 5));
    p.enabled = false;
    assert_false(cli_progress_due(&p, 100 * SECOND));
}

static void test_progress_line(void **state) {
    (void)state;
    cli_progress p = {.verb = "saving", .started_ns = 1};
    char line[256];
    uint64_t mib = UINT64_C(1) << 20;
    cli_progress_line(line, sizeof(line), &p, 300 * mib, 1200 * mib, 1 + 2 * SECOND);
    assert_string_equal(line, "saving  300.0 MiB of 1.2 GiB  25 %  150.0 MiB/s  6 s left");
    cli_progress_line(line, sizeof(line), &p, 300 * mib, 0, 1 + 2 * SECOND);
    assert_string_equal(line, "saving  300.0 MiB  150.0 MiB/s");
    cli_progress_line(line, sizeof(line), &p, 0, 1200 * mib, 1 + SECOND);
    assert_string_equal(line, "saving  0 B of 1.2 GiB  0 %  0 B/s");
    cli_progress_line(line, sizeof(line), &p, 1300 * mib, 1200 * mib, 1 + SECOND);
    assert_string_equal(line, "saving  1.3 GiB of 1.2 GiB  100 %  1.3 GiB/s  0 s left");
}

/* The standard error of a test is a file or a pipe, so there is no progress. */
static void test_progress_is_for_terminals(void **state) {
    (void)state;
    int keep = dup(STDERR_FILENO), pipes[2];
    assert_int_equal(pipe(pipes), 0);
    assert_true(dup2(pipes[1], STDERR_FILENO) >= 0);
    cli_progress p;
    cli_progress_begin(&p, "saving", false);
    bool enabled = p.enabled;
    dup2(keep, STDERR_FILENO);
    close(keep);
    close(pipes[0]);
    close(pipes[1]);
    assert_false(enabled);
}

static void test_a_signal_cancels(void **state) {
    (void)state;
    cli_progress p = {.verb = "saving"};
    assert_int_equal(cli_progress_update(&p, 1, 2), 0);
    cli_interrupt_catch();
    assert_int_equal(raise(SIGTERM), 0);
    assert_int_equal(cli_interrupted(), SIGTERM);
    assert_true(cli_progress_update(&p, 1, 2) != 0);
    struct sigaction now;
    assert_int_equal(sigaction(SIGTERM, NULL, &now), 0);
    assert_true(now.sa_handler == SIG_DFL); /* a second signal ends the process */
    signal(SIGINT, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
}

/* ------------------------------------------------------------------------------------------------- output files */

typedef struct fixture {
    char folder[64], path[96];
} fixture;

static int make_folder(void **state) {
    static fixture f;
    const char *tmp = getenv("TMPDIR");
    snprintf(f.folder, sizeof(f.folder), "%s/out-XXXXXX", tmp && strlen(tmp) < 40 ? tmp : "/tmp");
    if (!mkdtemp(f.folder))
        return -1;
    snprintf(f.path, sizeof(f.path), "%s/out", f.folder);
    *state = &f;
    return 0;
}

/* Rmdir fails if a temporary file is left over. */
static int remove_folder(void **state) {
    fixture *f = *state;
    if (unlink(f->path) != 0)
        rmdir(f->path);
    return rmdir(f->folder);
}

static void put(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void assert_content(const char *path, const char *text) {
    char content[64] = "";
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t size = fread(content, 1, sizeof(content) - 1, file);
    fclose(file);
    assert_int_equal(size, strlen(text));
    assert_string_equal(content, text);
}

static cli_output *open_output(const fixture *f, bool force) {
    cli_output *out;
    ckd_error err;
    assert_int_equal(cli_output_open(&out, f->path, force, 6, &err), CKD_OK);
    assert_int_equal(cli_output_write(out, "new", 3, &err), CKD_OK);
    assert_int_equal(cli_output_write(out, "er\n", 3, &err), CKD_OK);
    return out;
}

static void test_output_appears_when_committed(void **state) {
    fixture *f = *state;
    ckd_error err;
    cli_output *out = open_output(f, false);
    assert_int_equal(access(f->path, F_OK), -1);
    assert_int_equal(cli_output_commit(out, &err), CKD_OK);
    assert_content(f->path, "newer\n");
}

static void test_aborted_output_leaves_nothing(void **state) {
    fixture *f = *state;
    cli_output_drop(open_output(f, false));
    assert_int_equal(access(f->path, F_OK), -1);
    cli_output_drop(NULL);
}

static void test_output_does_not_replace_files(void **state) {
    fixture *f = *state;
    ckd_error err;
    put(f->path, "old");
    assert_int_equal(cli_output_check(f->path, false, &err), CKD_E_EXISTS);
    assert_non_null(strstr(err.message, "--force"));
    assert_int_equal(cli_output_check(f->path, true, &err), CKD_OK);
    /* The same if the file appears after the check. */
    assert_int_equal(cli_output_commit(open_output(f, false), &err), CKD_E_EXISTS);
    assert_content(f->path, "old");
    assert_int_equal(cli_output_commit(open_output(f, true), &err), CKD_OK);
    assert_content(f->path, "newer\n");
}

/* --force must never replace a device or a folder. */
static void test_forced_output_replaces_only_regular_files(void **state) {
    fixture *f = *state;
    ckd_error err;
    assert_int_equal(mkdir(f->path, 0700), 0);
    assert_int_equal(cli_output_check(f->path, true, &err), CKD_E_EXISTS);
    assert_int_equal(cli_output_commit(open_output(f, true), &err), CKD_E_EXISTS);
    assert_int_equal(cli_output_check("/dev/null", true, &err), CKD_E_EXISTS);
}

static void test_output_names(void **state) {
    fixture *f = *state;
    cli_output *out;
    ckd_error err;
    char path[512];
    snprintf(path, sizeof(path), "%s/", f->folder);
    assert_int_equal(cli_output_open(&out, path, false, 0, &err), CKD_E_INVALID);
    assert_null(out);
    snprintf(path, sizeof(path), "%s/absent/out", f->folder);
    assert_int_equal(cli_output_open(&out, path, false, 0, &err), CKD_E_NOT_FOUND);
    assert_int_equal(err.sys_errno, ENOENT);
    /* The name has the largest length, so the temporary name is cut. */
    snprintf(path, sizeof(path), "%s/%0255d", f->folder, 1);
    assert_int_equal(cli_output_open(&out, path, false, 0, &err), CKD_OK);
    assert_int_equal(cli_output_commit(out, &err), CKD_OK);
    assert_int_equal(unlink(path), 0);
    /* A name without a folder is in the current folder. */
    char before[512];
    assert_non_null(getcwd(before, sizeof(before)));
    assert_int_equal(chdir(f->folder), 0);
    ckd_status status = cli_output_open(&out, "out", false, 0, &err);
    if (status == CKD_OK)
        status = cli_output_commit(out, &err);
    assert_int_equal(chdir(before), 0);
    assert_int_equal(status, CKD_OK);
    assert_content(f->path, "");
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_other_figures),
        cmocka_unit_test(test_control_characters_are_shown),
        cmocka_unit_test(test_exit_statuses),
        cmocka_unit_test(test_damage_of_skipped_checkpoints),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_checkpoint_names),
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_boxes_in_slices),
        cmocka_unit_test(test_shards_and_regions),
        cmocka_unit_test(test_shards_are_chunks),
        cmocka_unit_test(test_dimensions_count_from_both_ends),
        cmocka_unit_test(test_progress_is_drawn_rarely),
        cmocka_unit_test(test_progress_line),
        cmocka_unit_test(test_progress_is_for_terminals),
        cmocka_unit_test(test_a_signal_cancels),
        WITH_FOLDER(test_output_appears_when_committed),
        WITH_FOLDER(test_aborted_output_leaves_nothing),
        WITH_FOLDER(test_output_does_not_replace_files),
        WITH_FOLDER(test_forced_output_replaces_only_regular_files),
        WITH_FOLDER(test_output_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
