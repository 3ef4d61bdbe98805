/* Layouts without files: ranks and paths, names in both directions, how dimensions are cut, means. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "cli/layout/layout.h"
#include "cli/files/files.h"
#include "tests/support/xorshift.h"

static layout *parse(const char *text) {
    layout *l;
    ckd_error err;
    if (layout_parse(&l, text, strlen(text), "text", &err) != CKD_OK)
        fail_msg("%s\n%s", err.message, text);
    return l;
}

/* ---- ranks and files ---- */

static void test_the_last_axis_counts_fastest(void **state) {
    (void)state;
    layout *l = parse("mesh pp=2 dp=3 tp=4\nw replicated\n");
    uint32_t at[LAYOUT_AXES];
    assert_int_equal(l->world, 24);
    layout_coordinates(at, l, 17);
    assert_int_equal(at[0], 1);
    assert_int_equal(at[1], 1);
    assert_int_equal(at[2], 1);
    for (uint32_t rank = 0; rank < l->world; rank++) {
        layout_coordinates(at, l, rank);
        assert_int_equal(layout_rank(l, at), rank);
    }
    assert_string_equal(layout_rank_text(l, 23).text, "rank 23 (pp=1 dp=2 tp=3)");
    layout_release(l);
}

static void test_paths(void **state) {
    (void)state;
    layout *l = parse("mesh pp=2 tp=12\nfiles mp_{tp:2}_{pp:3}/m\nfiles o{pp}-{tp}\nw replicated\n");
    static const struct {
        const char *path;
        size_t rank;
    } cases[] = {
        {"mp_00_000/m", 0},
        {"/data/mp_11_001/m", 23},
        {"a/b/mp_01_001/m", 13},
        {"o1-11", 23},
        {"x/o0-1", 1},
        {"xo0-1", LAYOUT_NONE},        /* not at the beginning of a name */
        {"mp_00_000/m2", LAYOUT_NONE}, /* has more characters */
        {"mp_0_000/m", LAYOUT_NONE},   /* too few digits */
        {"mp_12_000/m", LAYOUT_NONE},  /* no such coordinate */
        {"mp_011_000/m", LAYOUT_NONE}, /* too many digits */
        {"o1-01", LAYOUT_NONE},        /* too many digits */
        {"o99999999999999999999-1", LAYOUT_NONE},
        {"", LAYOUT_NONE},
        {"/", LAYOUT_NONE},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (layout_rank_of_path(l, cases[i].path) != cases[i].rank)
            fail_msg("%s is rank %zu", cases[i].path, layout_rank_of_path(l, cases[i].path));
    for (uint32_t rank = 0; rank < l->world; rank++) {
        char *path = layout_path_of_rank(l, rank);
        assert_int_equal(layout_rank_of_path(l, path), rank);
        free(path);
    }
    layout_release(l);
    l = parse("mesh dp=3 tp=2\nfiles o{dp}-{tp}\nfiles w{tp} dp=0\nfiles v{tp} dp=last\nw replicated\n");
    assert_int_equal(layout_rank_of_path(l, "x/w1"), 1);
    assert_int_equal(layout_rank_of_path(l, "x/v1"), 5);
    assert_int_equal(layout_rank_of_path(l, "x/v2"), LAYOUT_NONE);
    assert_int_equal(layout_rank_of_path(l, "x/o1-1"), 3);
    layout_release(l);
    l = parse("mesh a=2\nfiles {rank:3}.safetensors\nw replicated\n");
    assert_int_equal(layout_rank_of_path(l, "x/001.safetensors"), 1);
    assert_int_equal(layout_rank_of_path(l, "x/002.safetensors"), LAYOUT_NONE);
    layout_release(l);
}

/* ---- names ---- */

/*
 * Finds the name in the checkpoint of a rank's tensor, by the first rule that applies; "-" if none does. Then
 * checks the way back.
 */
static void check_name(const layout *l, uint32_t rank, const char *local, const char *global) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    layout_bindings there, back;
    char *name = NULL, *again = NULL;
    layout_coordinates(at, l, rank);
    assert_int_equal(layout_bind(&there, l, local, false, NULL), CKD_OK);
    const layout_binding *b = layout_choose(numbers, l, &there, at);
    assert_int_equal(b != NULL, strcmp(global, "-") != 0);
    if (b) {
        assert_int_equal(layout_other_name(&name, l, b, &(layout_name_values){at, numbers, 0}, NULL), CKD_OK);
        assert_string_equal(name, global);
        assert_int_equal(layout_bind(&back, l, global, true, NULL), CKD_OK);
        const layout_binding *c = layout_choose(numbers, l, &back, at);
        assert_non_null(c);
        assert_ptr_equal(c->rule, b->rule);
        assert_int_equal(layout_other_name(&again, l, c, &(layout_name_values){at, numbers, c->part}, NULL),
                         CKD_OK);
        assert_string_equal(again, local);
        layout_bindings_free(&back);
    }
    free(name);
    free(again);
    layout_bindings_free(&there);
}

static void test_names(void **state) {
    (void)state;
    layout *l = parse("mesh pp=2 tp=2\n"
                      "state opt.*.m exp_avg.*\n"
                      "number layer over=pp table=0,3/1,2,4\n"
                      "number expert over=tp sizes=1,3\n"
                      "a\\.{layer}\\.e{expert}\\.w expert\n"
                      "(enc|dec)\\.{layer}\\.(.*_(w|b)) replicated as=\\2/\\1[{layer}]\n"
                      "fused sharded dim=0 over=tp parts=q,k as=x.{part}.y\n"
                      "rng replicated as=rng.{pp}-{tp}\n"
                      "seed unique as=seed.{rank}\n"
                      "stage(.*) unique tp=1 as=stage{pp}\\1\n"
                      "last replicated pp=last\n"
                      "last.* replicated\n"
                      "[[:alpha:]]+]|b{2,3} replicated\n");
    check_name(l, 0, "a.1.e0.w", "a.3.e0.w");
    check_name(l, 1, "a.0.e2.w", "a.0.e3.w");
    check_name(l, 2, "a.2.e0.w", "a.4.e0.w");
    check_name(l, 0, "a.2.e0.w", "-"); /* stage 0 has two layers */
    check_name(l, 0, "a.0.e1.w", "-"); /* tp 0 has one expert */
    check_name(l, 0, "xa.0.e0.w", "-");
    check_name(l, 0, "a.0.e0.w2", "-");
    check_name(l, 3, "dec.1.fc_w", "fc_w/dec[2]");
    check_name(l, 3, "opt.dec.1.fc_w.m", "exp_avg.fc_w/dec[2]");
    check_name(l, 3, "exp_avg_sq.dec.1.fc_w", "exp_avg_sq.fc_w/dec[2]");
    check_name(l, 3, "opt.fused.m", "exp_avg.x.q.y");
    check_name(l, 0, "last", "last"); /* by the second rule */
    check_name(l, 3, "rng", "rng.1-1");
    check_name(l, 2, "seed", "seed.2");
    check_name(l, 3, "stage.w", "stage1.w");
    check_name(l, 2, "stage.w", "-");
    check_name(l, 2, "last", "last");
    check_name(l, 2, "abc]", "abc]");
    check_name(l, 2, "bbb", "bbb");
    check_name(l, 2, "b", "-");
    check_name(l, 2, "", "-");
    layout_release(l);
}

static void test_global_numbers(void **state) {
    (void)state;
    layout *l = parse("mesh pp=2\nnumber n over=pp count=4 global\nw{n} replicated\n");
    check_name(l, 0, "w1", "w1");
    check_name(l, 1, "w3", "w3");
    check_name(l, 0, "w2", "-");
    check_name(l, 1, "w4", "-");
    layout_release(l);
}

/* ---- cuts ---- */

/*
 * Describes the stretches of each rank as "part:offset+length ...", with | between ranks, ~ for padding, and
 * #copy if there are several copies.
 */
static void describe(char *to, size_t capacity, const layout *l, uint64_t total) {
    uint64_t shape[2] = {3, total}, totals[8];
    const layout_rule *rule = l->rules;
    size_t used = 0;
    for (size_t i = 0; i < layout_tensors_of(rule); i++)
        totals[i] = rule->parts && rule->apart && rule->parts[i].size ? rule->parts[i].size : total;
    to[0] = '\0';
    for (uint32_t rank = 0; rank < l->world; rank++) {
        uint32_t at[LAYOUT_AXES];
        layout_share s;
        ckd_error err;
        layout_coordinates(at, l, rank);
        if (layout_share_make(&s, l, rule, at, &(layout_whole){2, shape, totals}, &err) != CKD_OK) {
            snprintf(to, capacity, "%s", err.message);
            return;
        }
        used += (size_t)snprintf(to + used, capacity - used, "%s", rank ? "|" : "");
        uint64_t length = 0;
        for (size_t i = 0; i < s.count; length += s.stretches[i++].length) {
            const layout_stretch *t = &s.stretches[i];
            if (t->part == LAYOUT_NONE)
                used += (size_t)snprintf(to + used, capacity - used, " ~%u", (unsigned)t->length);
            else
                used += (size_t)snprintf(to + used, capacity - used, " %u:%u+%u", (unsigned)t->part,
                                         (unsigned)t->offset, (unsigned)t->length);
            assert_true(t->copy < t->copies);
            if (t->copies > 1)
                used += (size_t)snprintf(to + used, capacity - used, "#%u", (unsigned)t->copy);
        }
        assert_int_equal(s.lengths[1], length);
        assert_int_equal(s.lengths[0], 3);
        assert_int_equal(s.dim, 1);
        layout_share_free(&s);
    }
}

static void test_cuts(void **state) {
    (void)state;
    static const struct {
        const char *rule;
        uint32_t world;
        uint64_t total;
        const char *what;
    } cases[] = {
        {"", 2, 6, " 0:0+3| 0:3+3"},
        {"", 2, 5,
         "text:2: dimension 1 has 5 elements, which cannot be cut evenly into 2; cut=chunk gives the last ones less"},
        {"unit=3", 2, 6, " 0:0+3| 0:3+3"},
        {"unit=2", 2, 6,
         "text:2: dimension 1 has 6 elements, which, in units of 2, cannot be cut evenly into 2; cut=chunk gives the last ones less"},
        {"cut=chunk", 4, 5, " 0:0+2| 0:2+2| 0:4+1| 0:5+0"},
        {"cut=chunk", 4, 0, " 0:0+0| 0:0+0| 0:0+0| 0:0+0"},
        {"cut=chunk unit=4", 3, 10, " 0:0+4| 0:4+4| 0:8+2"},
        {"cut=chunk unit=4", 4, 10, " 0:0+4| 0:4+4| 0:8+2| 0:10+0"},
        {"sizes=0,5,1", 3, 6, " 0:0+0| 0:0+5| 0:5+1"},
        {"sizes=0,5,1", 3, 7, "text:2: sizes= adds up to 6, dimension 1 has 7 elements"},
        {"pad=4", 2, 5, " 0:0+4 ~0| 0:4+1 ~3"},
        {"pad=4", 4, 5, " 0:0+4 ~0| 0:4+1 ~3| 0:5+0 ~4| 0:5+0 ~4"},
        {"pad=4", 2, 8, " 0:0+4 ~0| 0:4+4 ~0"},
        {"size=5", 3, 5, " 0:0+2 ~0| 0:2+2 ~0| 0:4+1 ~1"},
        {"size=5", 3, 6, "text:2: dimension 1 has 6 elements, size= says 5"},
        {"sizes=4,4 size=5", 2, 5, " 0:0+4 ~0| 0:4+1 ~3"},
        {"sizes=4,4 size=9", 2, 9, "text:2: 9 elements cannot be padded that way"},
        {"parts=a,b", 2, 8, " 0:0+2 0:4+2| 0:2+2 0:6+2"},
        {"parts=a,b", 2, 7, "text:2: dimension 1 has 7 elements, which do not match parts="},
        {"parts=a:6:2,b:2:2 cut=chunk", 3, 8, " 0:0+2 0:6+2| 0:2+2 0:8+0| 0:4+2 0:8+0"},
        {"parts=a:6,b:2 as={part}", 2, 0, " 0:0+3 1:0+1| 0:3+3 1:1+1"},
        {"parts=a:6,b:3 groups=3 cut=chunk as={part}", 2, 0, " 0:0+2 1:0+1 0:2+2 1:1+1| 0:4+2 1:2+1"},
        {"parts=a,b groups=3 cut=chunk as={part}", 2, 6, " 0:0+2 1:0+2 0:2+2 1:2+2| 0:4+2 1:4+2"},
        {"parts=a,b groups=4 as={part}", 2, 6, "text:2: a has 6 elements, which are not 4 groups"},
        {"cut=repeat unit=2 size=4", 4, 4, " 0:0+2#0| 0:0+2#1| 0:2+2#0| 0:2+2#1"},
        {"cut=repeat unit=2 size=4", 2, 4, " 0:0+2| 0:2+2"},
        {"cut=repeat unit=2 size=8", 2, 8, " 0:0+4| 0:4+4"},
        {"cut=repeat size=1", 3, 1, " 0:0+1#0| 0:0+1#1| 0:0+1#2"},
        {"cut=repeat unit=2 size=4", 3, 4,
         "text:2: dimension 1 has 4 elements, in units of 2, which cannot be repeated evenly on 3 places"},
        {"cut=repeat unit=3 size=4", 2, 4,
         "text:2: dimension 1 has 4 elements, in units of 3, which cannot be repeated evenly on 2 places"},
        {"cut=repeat unit=2 size=4", 2, 6, "text:2: dimension 1 has 6 elements, size= says 4"},
        {"parts=q:8:2,k:4:2:repeat", 4, 12, " 0:0+2 0:8+2#0| 0:2+2 0:8+2#1| 0:4+2 0:10+2#0| 0:6+2 0:10+2#1"},
        {"parts=q:4:2,k:2:2:repeat cut=chunk as={part}", 4, 0,
         " 0:0+2 1:0+2#0| 0:2+2 1:0+2#1| 0:4+0 1:0+2#2| 0:4+0 1:0+2#3"},
        {"parts=q:4:2,k:2:2 cut=repeat as={part}", 2, 0, " 0:0+2 1:0+2#0| 0:2+2 1:0+2#1"},
        {"parts=q:8:2,k:4:2:repeat groups=2 as={part}", 4, 0,
         " 0:0+2 1:0+2#0| 0:2+2 1:0+2#1| 0:4+2 1:2+2#0| 0:6+2 1:2+2#1"},
        {"parts=q:8:2,k:4:2:repeat groups=2 as={part}", 2, 0, " 0:0+4 1:0+2| 0:4+4 1:2+2"},
        {"parts=q:8:2,k:4:2:repeat groups=2 as={part}", 3, 0,
         "text:2: 2 groups cannot be shared evenly by 3 places"},
        {"parts=q:8:4,k:4:2:repeat groups=2 as={part}", 4, 0,
         "text:2: q: dimension 1 has 4 elements, which, in units of 4, cannot be cut evenly into 2; cut=chunk gives the last ones less"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[300], what[600];
        snprintf(text, sizeof(text), "mesh tp=%u\nw sharded dim=1 over=tp %s\n", cases[i].world,
                 cases[i].rule);
        layout *l = parse(text);
        describe(what, sizeof(what), l, cases[i].total);
        assert_string_equal(what, cases[i].what);
        layout_release(l);
    }
}

static void test_a_grid(void **state) {
    (void)state;
    layout *l = parse("mesh a=2 b=3\nw sharded dim=0 over=b cut=chunk dim=2 over=a parts=x,y\n");
    uint32_t at[LAYOUT_AXES];
    uint64_t shape[3] = {4, 7, 8}, total = 8;
    layout_share s;
    layout_coordinates(at, l, 4);
    assert_int_equal(layout_share_make(&s, l, l->rules, at, &(layout_whole){3, shape, &total}, NULL), CKD_OK);
    assert_int_equal(s.dim, 2);
    assert_int_equal(s.offsets[0], 2);
    assert_int_equal(s.lengths[0], 2);
    assert_int_equal(s.lengths[1], 7);
    assert_int_equal(s.lengths[2], 4);
    assert_int_equal(s.stretches[0].offset, 2);
    assert_int_equal(s.stretches[1].offset, 6);
    layout_share_free(&s);
    layout_release(l);
}

/* Makes a random rule as text, and its total length. */
static void random_rule(char *to, size_t capacity, uint32_t places, uint64_t *total) {
    static const char *const cuts[] = {"", "cut=even", "cut=chunk"};
    const char *cut = cuts[next_random() % 3];
    uint64_t unit = 1 + next_random() % 5, units = next_random() % 40;
    if (!*cut || cut[4] == 'e')
        units = units / places * places;
    *total = unit * units;
    switch (next_random() % 5) {
    case 0:
        snprintf(to, capacity, "%s unit=%u", cut, (unsigned)unit);
        break;
    case 1:
        *total += next_random() % 7;
        snprintf(to, capacity, "pad=%u", (unsigned)unit);
        break;
    case 2:
        *total *= 3;
        snprintf(to, capacity, "%s parts=a,b,c", cut);
        break;
    case 3: /* fewer units than places, so that several places have each */
        units = places;
        for (uint64_t by = 1 + next_random() % places; units % by == 0 && by > 1;)
            units /= by;
        *total = unit * units;
        snprintf(to, capacity, "cut=repeat unit=%u size=%u", (unsigned)unit, (unsigned)*total);
        break;
    default:
        *total = *total ? *total * 4 : 4 * unit * places;
        snprintf(to, capacity, "%s parts=a:%u:%u,b:%u:%u", cut, (unsigned)(*total / 4), (unsigned)unit,
                 (unsigned)(*total / 4 * 3), (unsigned)unit);
    }
}

/*
 * For random rules, each copy has each element once, and the stretches of each rank are as long as its
 * tensor.
 */
static void test_random_cuts_hold_each_element_once(void **state) {
    (void)state;
    for (int round = 0; round < 5000; round++) {
        uint32_t places = 1 + (uint32_t)(next_random() % 9);
        uint64_t total, shape[1];
        char rule[120], text[200];
        random_rule(rule, sizeof(rule), places, &total);
        snprintf(text, sizeof(text), "mesh a=%u\nw sharded dim=0 over=a %s\n", places, rule);
        layout *l = parse(text);
        uint8_t *seen = calloc((total + 1) * places, 1);
        uint32_t copies = 1;
        shape[0] = total;
        for (uint32_t rank = 0; rank < places; rank++) {
            uint32_t at[LAYOUT_AXES] = {rank};
            layout_share s;
            ckd_error err;
            if (layout_share_make(&s, l, l->rules, at, &(layout_whole){1, shape, &total}, &err) != CKD_OK)
                fail_msg("%s: %s", text, err.message);
            uint64_t length = 0;
            for (size_t i = 0; i < s.count; length += s.stretches[i++].length) {
                const layout_stretch *t = &s.stretches[i];
                assert_true(t->copy < t->copies && t->copies <= places);
                copies = t->copies;
                for (uint64_t k = 0; t->part != LAYOUT_NONE && k < t->length; k++)
                    assert_int_equal(seen[t->copy * total + t->offset + k]++, 0);
            }
            assert_int_equal(length, s.lengths[0]);
            layout_share_free(&s);
        }
        for (uint64_t k = 0; k < total * copies; k++)
            assert_int_equal(seen[k], 1);
        free(seen);
        layout_release(l);
    }
}

/* ---- means ---- */

static uint16_t mean_of(uint16_t a, uint16_t b, ckd_dtype dtype) {
    double sum = -0.0;
    uint16_t out;
    cli_mean_add(&sum, &a, dtype, 1);
    cli_mean_add(&sum, &b, dtype, 1);
    cli_mean_end(&out, &sum, dtype, 1, 2);
    return out;
}

/* For all 16-bit values: the mean of equal values is that value, and that of neighbours is the even one. */
static void test_means_of_16_bits(void **state) {
    (void)state;
    static const struct {
        ckd_dtype dtype;
        uint16_t infinity;
    } kinds[] = {{CKD_F16, 0x7c00}, {CKD_BF16, 0x7f80}};
    for (size_t k = 0; k < 2; k++) {
        for (uint32_t bits = 0; bits <= kinds[k].infinity; bits++) {
            uint16_t x = (uint16_t)bits, minus = x | 0x8000;
            assert_int_equal(mean_of(x, x, kinds[k].dtype), x);
            assert_int_equal(mean_of(minus, minus, kinds[k].dtype), minus);
            if (bits + 1 < kinds[k].infinity) {
                uint16_t even = (uint16_t)(x + (x & 1));
                assert_int_equal(mean_of(x, x + 1, kinds[k].dtype), even);
                assert_int_equal(mean_of(minus + 1, minus, kinds[k].dtype), even | 0x8000);
            }
        }
        uint16_t nan = mean_of(kinds[k].infinity, kinds[k].infinity | 0x8000, kinds[k].dtype);
        assert_true((nan & 0x7fff) > kinds[k].infinity);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_last_axis_counts_fastest),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_global_numbers),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_a_grid),
        cmocka_unit_test(test_random_cuts_hold_each_element_once),
        cmocka_unit_test(test_means_of_16_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
