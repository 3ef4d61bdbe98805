/*
 * Flat buffers of layouts, without files: their parameters, the elements of these that a rank has, and ranges
 * as boxes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "cli/layout/layout.h"
#include "tests/support/xorshift.h"

static layout *parse(const char *text) {
    layout *l;
    ckd_error err;
    if (layout_parse(&l, text, strlen(text), "text", &err) != CKD_OK)
        fail_msg("%s\n%s", err.message, text);
    return l;
}

/* ---- parameters ---- */

typedef struct listing {
    char text[2000];
    size_t used;
} listing;

/* Lists the buffers of a rank as "buffer: parameter@line ...;". */
static ckd_status list_buffer(void *context, const layout_buffer *b, ckd_error *err) {
    listing *to = context;
    (void)err;
    to->used += (size_t)snprintf(to->text + to->used, sizeof(to->text) - to->used, "%s:", b->name);
    for (size_t i = 0; i < b->count; i++) {
        const layout_parameter *p = &b->parameters[i];
        to->used +=
            (size_t)snprintf(to->text + to->used, sizeof(to->text) - to->used, " %s@%u", p->name, p->line);
        assert_non_null(strstr(p->name, p->plain));
    }
    to->used += (size_t)snprintf(to->text + to->used, sizeof(to->text) - to->used, ";");
    return CKD_OK;
}

static void check_buffers(const layout *l, uint32_t rank, const char *what) {
    uint32_t at[LAYOUT_AXES];
    listing found = {.used = 0};
    layout_coordinates(at, l, rank);
    assert_int_equal(layout_each_buffer(l, at, list_buffer, &found, NULL), CKD_OK);
    assert_string_equal(found.text, what);
}

static void test_parameters(void **state) {
    (void)state;
    layout *l = parse("mesh pp=2 dp=2\n"
                      "number layer over=pp sizes=2,1\n"
                      "number expert over=pp table=4,7/1 global\n"
                      "list all first pp=0\n"
                      "list all l.{layer}.a l.{layer}.b\n"
                      "list one u.{layer}:3 v:2x2\n"
                      "list all {layer}.e.{expert} last pp=last\n"
                      "list all end:scalar\n"
                      "all flat of=all over=dp state=none\n"
                      "one\\.{layer}\\.f flat of=one over=dp state=exp_avg.*\n"
                      "none flat of=all over=dp pp=1 state=none\n"
                      ".* replicated\n");
    check_buffers(l, 1,
                  "all: first@4 l.0.a@5 l.0.b@5 l.1.a@5 l.1.b@5 end@8;"
                  "exp_avg.one.0.f: exp_avg.u.0@6 exp_avg.v@6;exp_avg.one.1.f: exp_avg.u.1@6 exp_avg.v@6;");
    check_buffers(l, 2,
                  "all: l.0.a@5 l.0.b@5 0.e.1@7 last@7 end@8;"
                  "exp_avg.one.0.f: exp_avg.u.0@6 exp_avg.v@6;"
                  "none: l.0.a@5 l.0.b@5 0.e.1@7 last@7 end@8;");
    layout_release(l);
    /* A line with several numbers: the first of them changes slowest. */
    l = parse("mesh b=1 a=1\nnumber x over=b count=2\nnumber y over=b table=3,5 global\nlist l {x}.{y} {y}\n"
              "f flat of=l over=a state=none\n.* replicated\n");
    check_buffers(l, 0, "f: 0.3@4 3@4 0.5@4 5@4 1.3@4 3@4 1.5@4 5@4;");
    layout_release(l);
}

static ckd_status refuse(void *context, const layout_buffer *b, ckd_error *err) {
    (void)b;
    (void)err;
    ++*(int *)context;
    return CKD_E_CANCELLED;
}

static void test_too_many_parameters_and_failing_callbacks(void **state) {
    (void)state;
    layout *l =
        parse("mesh b=1 a=1\nnumber x over=b count=2000\nnumber y over=b count=2000\nlist l p{x}.{y}\n"
              "f flat of=l over=a\n.* replicated\n");
    uint32_t at[LAYOUT_AXES] = {0};
    ckd_error err;
    int calls = 0;
    assert_int_equal(layout_each_buffer(l, at, refuse, &calls, &err), CKD_E_MISMATCH);
    assert_string_equal(err.message, "text:4: a buffer has more than 1048576 parameters");
    assert_int_equal(calls, 0);
    layout_release(l);
    l = parse("mesh a=1\nlist l p\nf flat of=l over=a\n.* replicated\n");
    assert_int_equal(layout_each_buffer(l, at, refuse, &calls, &err), CKD_E_CANCELLED);
    assert_int_equal(calls, 1);
    layout_release(l);
}

/* ---- elements ---- */

/* Describes each place as "length: at=first+count ...", with | between places. */
static void describe(char *to, size_t capacity, const layout *l, const uint64_t *sizes, size_t count) {
    size_t used = 0;
    for (uint32_t rank = 0; rank < l->world; rank++) {
        uint32_t at[LAYOUT_AXES];
        layout_range ranges[8];
        layout_ranges r = {sizes, count, ranges, 0};
        ckd_error err;
        layout_coordinates(at, l, rank);
        if (layout_ranges_make(&r, l, l->rules, at, &err) != CKD_OK) {
            snprintf(to, capacity, "%s", err.message);
            return;
        }
        used += (size_t)snprintf(to + used, capacity - used, "%s%u:", rank ? "|" : "", (unsigned)r.length);
        for (size_t i = 0; i < count; i++)
            if (ranges[i].count)
                used += (size_t)snprintf(to + used, capacity - used, " %u=%u+%u", (unsigned)ranges[i].at,
                                         (unsigned)ranges[i].first, (unsigned)ranges[i].count);
    }
}

static void test_ranges(void **state) {
    (void)state;
    static const struct {
        const char *options;
        uint32_t places;
        uint64_t sizes[4]; /* a 0 follows the last one */
        const char *what;
    } cases[] = {
        {"", 1, {5, 3}, "8: 0=0+5 5=0+3"},
        {"", 2, {5, 3}, "4: 0=0+4|4: 0=4+1 1=0+3"},
        {"", 3, {5, 3}, "3: 0=0+3|3: 0=3+2 2=0+1|3: 0=1+2"},
        {"", 4, {2}, "1: 0=0+1|1: 0=1+1|1:|1:"},
        {"padding=none", 4, {2}, "1: 0=0+1|1: 0=1+1|0:|0:"},
        {"padding=none", 3, {5, 3}, "3: 0=0+3|3: 0=3+2 2=0+1|2: 0=1+2"},
        {"pad=4", 2, {5}, "4: 0=0+4|4: 0=4+1"},
        {"pad=2", 4, {3, 3}, "2: 0=0+2|2: 0=2+1 1=0+1|2: 0=1+2|2:"},
        {"pad_all=6", 4, {5}, "3: 0=0+3|3: 0=3+2|3:|3:"},
        {"pad_all=8", 2, {9}, "8: 0=0+8|8: 0=8+1"},
        {"pad_all=8", 3, {9}, "8: 0=0+8|8: 0=8+1|8:"},
        {"align=4", 2, {5, 3}, "6: 0=0+5|6: 2=0+3"},
        {"align=4", 3, {5, 3}, "4: 0=0+4|4: 0=4+1|4: 0=0+3"},
        {"align=4", 2, {4, 4}, "4: 0=0+4|4: 0=0+4"},
        {"cut=each", 2, {5, 3}, "5: 0=0+3 3=0+2|5: 0=3+2 3=2+1"},
        {"cut=each", 4, {5, 1}, "3: 0=0+2 2=0+1|3: 0=2+2|3: 0=4+1|3:"},
        {"cut=each padding=none", 4, {5, 1}, "3: 0=0+2 2=0+1|2: 0=2+2|1: 0=4+1|0:"},
        {"cut=each pad=2 align=4", 2, {3, 3}, "6: 0=0+2 4=0+2|6: 0=2+1 4=2+1"},
        {"pad=1099511627776", 2, {3}, "text:3: elements cannot be padded that way"},
        {"pad=1099511627776 pad_all=1099511627775", 1, {3}, "text:3: elements cannot be padded that way"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[200], what[600] = "";
        size_t count = 0;
        while (cases[i].sizes[count])
            count++;
        snprintf(text, sizeof(text), "mesh a=%u\nlist l x\nf flat of=l over=a %s\n", cases[i].places,
                 cases[i].options);
        layout *l = parse(text);
        describe(what, sizeof(what), l, cases[i].sizes, count);
        assert_string_equal(what, cases[i].what);
        layout_release(l);
    }
}

/* All places together have each element once and in order, and no ranges overlap. */
static void check_cover(const layout *l, const uint64_t *sizes, size_t count) {
    uint64_t next[6] = {0};
    layout_range ranges[6];
    layout_ranges r = {sizes, count, ranges, 0};
    for (uint32_t rank = 0; rank < l->world; rank++) {
        uint32_t at[LAYOUT_AXES] = {rank};
        assert_int_equal(layout_ranges_make(&r, l, l->rules, at, NULL), CKD_OK);
        uint64_t used = 0;
        for (size_t i = 0; i < count; i++) {
            if (ranges[i].count) {
                assert_int_equal(ranges[i].first, next[i]);
                assert_true(ranges[i].at >= used);
                used = ranges[i].at + ranges[i].count;
                next[i] += ranges[i].count;
            }
        }
        assert_true(used <= r.length);
    }
    for (size_t i = 0; i < count; i++)
        assert_int_equal(next[i], sizes[i]);
}

static void test_random_ranges_hold_each_element_once(void **state) {
    (void)state;
    for (int round = 0; round < 5000; round++) {
        char text[200];
        uint64_t sizes[6];
        size_t count = 1 + next_random() % 6;
        for (size_t i = 0; i < count; i++)
            sizes[i] = next_random() % 54;
        snprintf(text, sizeof(text),
                 "mesh a=%u\nlist l x\nf flat of=l over=a pad=%u pad_all=%u align=%u %s %s\n",
                 1 + (unsigned)(next_random() % 9), 1 + (unsigned)(next_random() % 5),
                 1 + (unsigned)(next_random() % 20), 1 + (unsigned)(next_random() % 8),
                 next_random() % 2 ? "cut=each" : "", next_random() % 2 ? "padding=none" : "");
        layout *l = parse(text);
        check_cover(l, sizes, count);
        layout_release(l);
    }
}

/* ---- boxes ---- */

/* The indices of all boxes, one after the other, must be first, first + 1, ... */
static void check_boxes(uint32_t ndim, const uint64_t *shape, uint64_t first, uint64_t count) {
    size_t boxes = 0;
    for (uint64_t done = 0; done < count; boxes++) {
        ckd_region box;
        uint64_t elements = layout_next_box(&box, ndim, shape, first + done, count - done), product = 1;
        for (uint32_t d = 0; d < ndim; d++) {
            product *= box.lengths[d];
            assert_true(box.offsets[d] + box.lengths[d] <= shape[d]);
        }
        assert_true(elements > 0 && elements == product && done + elements <= count);
        for (uint64_t i = 0; i < elements; i++) {
            uint64_t rest = i, index = 0, step = 1;
            for (uint32_t d = ndim; d-- > 0; rest /= box.lengths[d], step *= shape[d])
                index += (box.offsets[d] + rest % box.lengths[d]) * step;
            assert_int_equal(index, first + done + i);
        }
        done += elements;
    }
    assert_true(boxes <= (count ? 2 * (size_t)ndim + 1 : 0));
}

static void test_ranges_as_boxes(void **state) {
    (void)state;
    static const uint64_t shapes[][4] = {{7},       {3, 5},       {1, 1},      {2, 1, 4},
                                         {3, 4, 5}, {2, 3, 1, 4}, {1, 6, 1, 2}};
    check_boxes(0, NULL, 0, 1);
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        uint32_t ndim = 0;
        uint64_t all = 1;
        while (ndim < 4 && shapes[s][ndim])
            all *= shapes[s][ndim++];
        for (uint64_t first = 0; first < all; first++)
            for (uint64_t count = 0; first + count <= all; count++)
                check_boxes(ndim, shapes[s], first, count);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_too_many_parameters_and_failing_callbacks),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_random_ranges_hold_each_element_once),
        cmocka_unit_test(test_ranges_as_boxes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
