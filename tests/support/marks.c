#include "tests/support/marks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/scenes.h"

/*
 * The states after each number of changes: the reason of the pin of step 1 (NULL: not pinned), the step that
 * has the tag (0: none), and how many checkpoints the policy keeps (0: no policy).
 */
static const struct {
    const char *reason;
    uint64_t tagged, kept;
} states[MARK_CHANGES + 2] = {{NULL, 0, 0},    {"first", 0, 0}, {"first", 1, 0}, {"first", 2, 0},
                              {"again", 2, 0}, {"again", 2, 5}, {"again", 2, 6}, {NULL, 2, 6},
                              {NULL, 0, 6},    {NULL, 0, 0},    {NULL, 0, 0}};

static ckd_status keep_last(ckd_store *store, uint32_t count, ckd_error *err) {
    ckd_policy p = CKD_POLICY_INIT;
    p.keep_last = count;
    return ckd_store_set_policy(store, &p, err);
}

int mark_removes(unsigned which) {
    return which >= 6;
}

ckd_status mark_change(ckd_store *store, unsigned which, ckd_error *err) {
    ckd_checkpoint c[2];
    for (uint64_t i = 0; i < 2; i++) {
        ckd_status status = ckd_store_find(&c[i], store, SCENE_RUN, i + 1, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    switch (which) {
    case 0:
        return ckd_store_pin(store, &c[0].id, states[1].reason, err);
    case 1:
        return ckd_store_set_tag(store, "best", &c[0].id, 1, err);
    case 2:
        return ckd_store_set_tag(store, "best", &c[1].id, 1, err);
    case 3:
        return ckd_store_pin(store, &c[0].id, states[4].reason, err);
    case 4:
    case 5:
        return keep_last(store, which + 1, err);
    case 6:
        return ckd_store_unpin(store, &c[0].id, err);
    case 7:
        return ckd_store_remove_tag(store, "best", err);
    default:
        return ckd_store_clear_policy(store, NULL, err);
    }
}

static int is_state(unsigned changes, const char *reason, uint64_t tagged, uint64_t kept) {
    const char *expected = states[changes].reason;
    return tagged == states[changes].tagged && kept == states[changes].kept &&
           (expected ? reason && strcmp(reason, expected) == 0 : reason == NULL);
}

void marks_check(const char *dir, unsigned changes) {
    ckd_store *store;
    ckd_pin_list *pins;
    ckd_tag_list *tags;
    ckd_policy_list *policies;
    ckd_checkpoint tagged = {.step = 0};
    ckd_error err = {0};
    if (scene_open(&store, dir, CKD_OPEN_READ, &err) != CKD_OK ||
        ckd_store_pins(&pins, store, &err) != CKD_OK || ckd_store_tags(&tags, store, &err) != CKD_OK ||
        ckd_store_policies(&policies, store, &err) != CKD_OK) {
        fail_msg("pins, tags and policies: %s", err.message);
    }
    assert_in_range(pins->count, 0, 1);
    assert_in_range(tags->count, 0, 1);
    assert_in_range(policies->count, 0, 1);
    assert_true(!policies->count || policies->items[0].status == CKD_OK);
    assert_true(!pins->count || pins->items[0].status == CKD_OK);
    if (tags->count && ckd_store_find_tag(&tagged, store, tags->items[0].tag, &err) != CKD_OK) {
        fail_msg("tag: %s", err.message);
    }
    const char *reason = pins->count ? pins->items[0].reason : NULL;
    uint64_t kept = policies->count ? policies->items[0].policy.keep_last : 0;
    if (!is_state(changes, reason, tagged.step, kept) && !is_state(changes + 1, reason, tagged.step, kept)) {
        fail_msg("after %u changes: pinned: %s, the tag is that of step %llu, the policy keeps %llu", changes,
                 reason ? reason : "no", (unsigned long long)tagged.step, (unsigned long long)kept);
    }
    ckd_policy_list_free(policies);
    ckd_pin_list_free(pins);
    ckd_tag_list_free(tags);
    ckd_store_close(store);
}
