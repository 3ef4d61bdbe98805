/* Shared by the parsers of a layout's text. Lines are split into words; a word that contains `=` is an option. */
#ifndef CLI_LAYOUT_PARSE_H
#define CLI_LAYOUT_PARSE_H

#include <stdio.h>

#include "cli/layout/layout.h"

#define LAYOUT_WORDS 1024 /* per line */

typedef struct layout_parsing {
    layout *l;
    uint32_t line;
    char *words[LAYOUT_WORDS];
    size_t count;
    ckd_error *err;
} layout_parsing;

/* Reports INVALID at the current line. */
ckd_status layout_invalid(layout_parsing *p, const char *format, ...) CLI_PRINTF(2, 3);

/* Each parses one line. Errors: INVALID, NOMEM. */
ckd_status layout_parse_mesh(layout_parsing *p);
ckd_status layout_parse_files(layout_parsing *p);
ckd_status layout_parse_state(layout_parsing *p);
ckd_status layout_parse_number(layout_parsing *p);
ckd_status layout_parse_list(layout_parsing *p);
ckd_status layout_parse_rule(layout_parsing *p);
/* Parses an option of a flat rule. After the last one, layout_flat_finish checks that they fit together. */
ckd_status layout_flat_option(layout_parsing *p, layout_rule *rule, const char *word);
ckd_status layout_flat_finish(layout_parsing *p, layout_rule *rule);
/* Called when all states are known: flat rules must name no others. */
ckd_status layout_flat_check_states(layout_parsing *p);
/* Does the flat rule have buffers of this state? */
bool layout_flat_has_state(const layout_rule *rule, const layout_state *s);

/* Is it a valid name of an axis, number or part: letters, digits, _ and -, starting with a letter? */
bool layout_is_name(const char *text, size_t length);
/* Returns LAYOUT_AXES if there is none. */
uint32_t layout_find_axis(const layout *l, const char *name, size_t length);
/* Parses "tp,dp". */
ckd_status layout_parse_over(layout_over *out, layout_parsing *p, const char *text);
/* Parses the number before the next `,` (or another mark) and moves past the mark. Returns false if there is none. */
bool layout_next_number(uint64_t *out, const char **text, char mark);
/* Parses "1,2,3"; free() it. */
ckd_status layout_parse_numbers(uint64_t **out, size_t *count, layout_parsing *p, const char *option,
                                const char *text);
/* Parses AXIS=COORDINATES: 0, 0,2 or last. */
ckd_status layout_parse_only(uint8_t *only[LAYOUT_AXES], layout_parsing *p, uint32_t axis, const char *value);
/* Returns UINT32_MAX if there is none. */
uint32_t layout_find_number(const layout *l, const char *name, size_t length);
/* Grows an array by one zeroed element. NULL, with INVALID or NOMEM in p->err, on failure. */
void *layout_append(layout_parsing *p, void *array, size_t *count, size_t size);

void layout_template_free(layout_template *t);
/* Adds an item with a copy of `length` bytes of text. */
ckd_status layout_template_add(layout_template *t, layout_item item, const char *text, size_t length,
                               ckd_error *err);

/*
 * Writes the name. Numbers are those of the template's rule or list line; b gives the captured groups, and its rule the
 * parts.
 */
void layout_template_write(FILE *to, const layout *l, const layout_template *t, const layout_binding *b,
                           const layout_name_values *values);

/* Compiles the rule's pattern, and as= unless it is NULL. */
ckd_status layout_compile(layout_parsing *p, layout_rule *rule, const char *as);
void layout_expression_free(layout_expression *e);
void layout_rule_free(layout_rule *rule);
void layout_list_free(layout_list *list);

#endif
