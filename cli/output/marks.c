/* Pins and tags as the commands show them: in cells of a table, in lines of text, and as JSON. */
#include "cli/output/output.h"

#include <stdlib.h>

ckd_status cli_marks_read(cli_marks *out, ckd_store *store, ckd_error *err) {
    *out = (cli_marks){0};
    ckd_status status = ckd_store_pins(&out->pins, store, err);
    return status == CKD_OK ? ckd_store_tags(&out->tags, store, err) : status;
}

void cli_marks_free(cli_marks *m) {
    ckd_pin_list_free(m->pins);
    ckd_tag_list_free(m->tags);
}

bool cli_marks_any(const cli_marks *m) {
    return m->pins->count || m->tags->count;
}

/* -------------------------------------------------------------------------------------------------------- JSON */

static json_t *json_ref(const ckd_id *id, const ckd_checkpoint_list *all) {
    const ckd_checkpoint *c = cli_by_id(all, id);
    return c ? json_string(cli_ref_text_of(c).text) : json_null();
}

static json_t *json_id(const ckd_id *id, bool known) {
    char text[CKD_ID_TEXT];
    ckd_id_text(text, id);
    return known ? json_string(text) : json_null();
}

static json_t *json_time(uint64_t ns, bool known) {
    return known ? json_string(cli_text_time(ns).text) : json_null();
}

json_t *cli_json_pins(const cli_marks *m, const ckd_checkpoint_list *listed, const ckd_checkpoint_list *all) {
    json_t *out = json_array();
    for (size_t i = 0; i < m->pins->count; i++) {
        const ckd_pin *p = &m->pins->items[i];
        bool readable = p->status == CKD_OK;
        if (!listed || cli_by_id(listed, &p->checkpoint)) {
            cli_json_append(&out,
                            json_pack("{s:o, s:o, s:b, s:o, s:o}", "checkpoint",
                                      json_ref(&p->checkpoint, all), "id", json_id(&p->checkpoint, true),
                                      "readable", readable, "since", json_time(p->pinned_ns, readable),
                                      "reason", p->reason[0] ? cli_json_text(p->reason) : json_null()));
        }
    }
    return out;
}

json_t *cli_json_tags(const cli_marks *m, const ckd_checkpoint_list *listed, const ckd_checkpoint_list *all) {
    json_t *out = json_array();
    for (size_t i = 0; i < m->tags->count; i++) {
        const ckd_tag *t = &m->tags->items[i];
        bool readable = t->status == CKD_OK;
        if (!listed || cli_by_id(listed, &t->checkpoint)) {
            cli_json_append(&out,
                            json_pack("{s:s, s:o, s:o, s:b, s:o}", "tag", t->tag, "checkpoint",
                                      json_ref(&t->checkpoint, all), "id", json_id(&t->checkpoint, readable),
                                      "readable", readable, "since", json_time(t->tagged_ns, readable)));
        }
    }
    return out;
}

/* -------------------------------------------------------------------------------------------------------- text */

static const ckd_pin *pin_of(const cli_marks *m, const ckd_checkpoint *c) {
    for (size_t i = 0; i < m->pins->count; i++) {
        if (cli_has_id(c, &m->pins->items[i].checkpoint)) {
            return &m->pins->items[i];
        }
    }
    return NULL;
}

void cli_marks_cell(cli_table *t, const cli_marks *m, const ckd_checkpoint *c) {
    enum { ROOM = 160 }; /* more tags are cut off */
    char text[ROOM + CKD_RUN_MAX + 8];
    bool pinned = pin_of(m, c) != NULL;
    size_t used = (size_t)snprintf(text, sizeof(text), "%s%s%s", c->suspect ? "suspect" : "",
                                   c->suspect && pinned ? " " : "", pinned ? "pinned" : "");
    for (size_t i = 0; i < m->tags->count && used < ROOM; i++) {
        const ckd_tag *tag = &m->tags->items[i];
        if (cli_has_id(c, &tag->checkpoint)) {
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s@%s", used ? " " : "", tag->tag);
        }
    }
    cli_table_cell(t, "%s", used ? text : "-");
}

void cli_marks_print(const cli_marks *m, const ckd_checkpoint *c) {
    const ckd_pin *pin = pin_of(m, c);
    if (pin) {
        printf("pinned        %s",
               pin->status == CKD_OK ? cli_text_time(pin->pinned_ns).text : "by a pin that cannot be read");
        if (pin->reason[0]) {
            fputs(": ", stdout);
            cli_print_clean(stdout, pin->reason);
        }
        fputs("\n", stdout);
    }
    bool any = false;
    for (size_t i = 0; i < m->tags->count; i++) {
        if (cli_has_id(c, &m->tags->items[i].checkpoint)) {
            printf("%s%s", any ? ", " : "tags          ", m->tags->items[i].tag);
            any = true;
        }
    }
    fputs(any ? "\n" : "", stdout);
}

/* Adds the checkpoint's name, or its id if it was deleted. */
static void place_cell(cli_table *t, const ckd_id *id, const ckd_checkpoint_list *all) {
    const ckd_checkpoint *c = cli_by_id(all, id);
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, id);
    cli_table_cell(t, c ? "%s" : "%s, which is gone", c ? cli_ref_text_of(c).text : hex);
}

static const char unreadable[] = "unreadable";

static ckd_status print_pins(const cli_marks *m, const ckd_checkpoint_list *all, ckd_error *err) {
    cli_table *t = cli_table_new("CHECKPOINT|PINNED|REASON");
    for (size_t i = 0; i < m->pins->count; i++) {
        const ckd_pin *p = &m->pins->items[i];
        place_cell(t, &p->checkpoint, all);
        cli_table_cell(t, "%s", p->status == CKD_OK ? cli_text_time(p->pinned_ns).text : unreadable);
        char *reason = cli_clean_copy(p->reason);
        cli_table_cell(t, "%s", reason ? reason : "");
        free(reason);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && !m->pins->count) {
        puts("no checkpoint is pinned");
    }
    return status;
}

static ckd_status print_tags(const cli_marks *m, const ckd_checkpoint_list *all, ckd_error *err) {
    cli_table *t = cli_table_new("TAG|CHECKPOINT|SINCE");
    for (size_t i = 0; i < m->tags->count; i++) {
        const ckd_tag *tag = &m->tags->items[i];
        cli_table_cell(t, "%s", tag->tag);
        if (tag->status == CKD_OK) {
            place_cell(t, &tag->checkpoint, all);
        } else {
            cli_table_cell(t, "-");
        }
        cli_table_cell(t, "%s", tag->status == CKD_OK ? cli_text_time(tag->tagged_ns).text : unreadable);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && !m->tags->count) {
        puts("there are no tags");
    }
    return status;
}

ckd_status cli_report_marks(ckd_store *store, cli_mark_kind kind, bool json, bool talks, ckd_error *err) {
    cli_marks m = {0};
    ckd_checkpoint_list *all = NULL;
    ckd_status status = cli_marks_read(&m, store, err);
    THEN(status, ckd_store_list(&all, store, NULL, err));
    if (status == CKD_OK && json) {
        json_t *items = kind == CLI_PINS ? cli_json_pins(&m, NULL, all) : cli_json_tags(&m, NULL, all);
        status = cli_json_print(
            json_pack("{s:i, s:o}", "schema", 1, kind == CLI_PINS ? "pins" : "tags", items), err);
    } else if (status == CKD_OK && talks) {
        status = kind == CLI_PINS ? print_pins(&m, all, err) : print_tags(&m, all, err);
    }
    ckd_checkpoint_list_free(all);
    cli_marks_free(&m);
    return status;
}
