/* Shows what an agent holds: as a table, in sentences, or as JSON. */
#include "cli/commands/agent_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const page_kinds[] = {
    [CKD_HUGE_PAGES_OFF] = "off", [CKD_HUGE_PAGES_TRY] = "try", [CKD_HUGE_PAGES_ON] = "on"};

bool cli_agent_parse_pages(ckd_huge_pages *out, const char *text) {
    for (int kind = CKD_HUGE_PAGES_OFF; kind <= CKD_HUGE_PAGES_ON; kind++) {
        if (strcmp(text, page_kinds[kind]) == 0) {
            *out = (ckd_huge_pages)kind;
            return true;
        }
    }
    return false;
}

/* ---- JSON ---- */

static json_t *json_rank(const ckd_agent_session *x, uint32_t number) {
    return x->world ? json_integer(number) : json_null();
}

static json_t *json_peers(const ckd_agent_state *s) {
    json_t *peers = json_array();
    for (size_t i = 0; i < s->peer_count; i++) {
        const ckd_agent_peer *p = &s->peers[i];
        cli_json_append(&peers,
                        json_pack("{s:o, s:o, s:b, s:b, s:I, s:I, s:o}", "name", cli_json_text(p->name),
                                  "domain", cli_json_text(p->domain[0] ? p->domain : NULL), "alive", p->alive,
                                  "partner", p->partner, "behind", (json_int_t)p->behind, "sent_bytes",
                                  (json_int_t)p->sent_bytes, "trouble",
                                  cli_json_text(p->trouble[0] ? p->trouble : NULL)));
    }
    return peers;
}

/* null: whole copies. */
static json_t *json_parity(const ckd_agent_state *s) {
    return s->parity
               ? json_pack("{s:I, s:I}", "data", (json_int_t)s->parity_data, "parity", (json_int_t)s->parity)
               : json_null();
}

/* null: the agent has neither other nodes nor a local disk. */
static json_t *json_copies(const ckd_agent_state *s) {
    if (!s->peer_count && !s->replicate && !s->local[0]) {
        return json_null();
    }
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "parity", json_parity(s), "replicate",
                     (json_int_t)s->replicate, "replicated", (json_int_t)s->replicated, "own_bytes",
                     (json_int_t)s->own_bytes, "held_bytes", (json_int_t)s->held_bytes, "states",
                     (json_int_t)s->kept, "state_bytes", (json_int_t)s->kept_bytes, "peers", json_peers(s),
                     "decisions", cli_json_text(s->decisions));
}

/* null: there is no --local. */
static json_t *json_local(const ckd_agent_state *s) {
    if (!s->local[0]) {
        return json_null();
    }
    return json_pack("{s:o, s:I, s:I, s:I, s:o}", "folder", cli_json_text(s->local), "bytes",
                     (json_int_t)s->local_bytes, "written_bytes", (json_int_t)s->local_written_bytes,
                     "behind", (json_int_t)s->local_behind, "trouble",
                     cli_json_text(s->local_trouble[0] ? s->local_trouble : NULL));
}

static ckd_status print_json(const ckd_agent_state *s, ckd_error *err) {
    json_t *sessions = json_array();
    for (size_t i = 0; i < s->count; i++) {
        const ckd_agent_session *x = &s->sessions[i];
        cli_json_append(&sessions,
                        json_pack("{s:o, s:o, s:o, s:I, s:b, s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:o}", "run",
                                  cli_json_text(x->run), "rank", json_rank(x, x->rank), "world",
                                  json_rank(x, x->world), "pid", (json_int_t)x->process, "connected",
                                  x->connected, "memory_bytes", (json_int_t)x->memory_bytes, "newest_step",
                                  cli_json_step(x->newest_step), "durable_step",
                                  cli_json_step(x->durable_step), "copied_step",
                                  cli_json_step(x->copied_step), "local_step", cli_json_step(x->local_step),
                                  "saved", (json_int_t)x->saved, "failed", (json_int_t)x->failed, "trouble",
                                  cli_json_text(x->trouble[0] ? x->trouble : NULL)));
    }
    return cli_json_print(
        json_pack("{s:i, s:I, s:o, s:I, s:I, s:s, s:I, s:o, s:o, s:o}", "schema", 1, "pid",
                  (json_int_t)s->process, "since", cli_json_text(cli_text_time(s->since_ns).text),
                  "memory_bytes", (json_int_t)s->memory_bytes, "budget_bytes", (json_int_t)s->budget_bytes,
                  "huge_pages", page_kinds[s->huge_pages], "huge_bytes", (json_int_t)s->huge_bytes,
                  "sessions", sessions, "copies", json_copies(s), "local", json_local(s)),
        err);
}

/* ---- tables ---- */

static void step_cell(cli_table *t, uint64_t step) {
    if (step == CKD_LATEST) {
        cli_table_cell(t, "-");
    } else {
        cli_table_cell(t, "%" PRIu64, step);
    }
}

static ckd_status print_peers(const ckd_agent_state *s, ckd_error *err) {
    if (s->parity) {
        printf("\nparity %" PRIu32 "+%" PRIu32 ": %" PRIu32 " of %" PRIu32
               " other nodes of the group have theirs; ",
               s->parity_data, s->parity, s->replicated, s->replicate);
    } else {
        printf("\n%" PRIu32 " of %" PRIu32 " copies are in place; ", s->replicated, s->replicate);
    }
    printf("files of this node's states take %s, %s %s\n", cli_text_size(s->own_bytes).text,
           s->parity ? "parity for others" : "of others'", cli_text_size(s->held_bytes).text);
    uint64_t sent = 0;
    cli_table *t = cli_table_new("NODE|DOMAIN|ALIVE|PARTNER|>BEHIND|>SENT|TROUBLE");
    for (size_t i = 0; i < s->peer_count; i++) {
        const ckd_agent_peer *p = &s->peers[i];
        sent += p->sent_bytes;
        cli_table_cell(t, "%s", p->name);
        cli_table_cell(t, "%s", p->domain[0] ? p->domain : "-");
        cli_table_cell(t, "%s", p->alive ? "yes" : "no");
        cli_table_cell(t, "%s", p->partner ? "yes" : "no");
        cli_table_cell(t, "%" PRIu64, p->behind);
        cli_table_cell(t, "%s", cli_text_size(p->sent_bytes).text);
        cli_table_cell(t, "%s", p->trouble[0] ? p->trouble : "-");
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && s->kept) {
        printf("%" PRIu64 " states of %s each; %s a state were sent\n", s->kept,
               cli_text_size(s->kept_bytes / s->kept).text, cli_text_size(sent / s->kept).text);
    }
    return status;
}

static ckd_status print_table(const ckd_agent_state *s, ckd_error *err) {
    printf("process %" PRId64 ", since %s, holds %s of %s", s->process, cli_text_time(s->since_ns).text,
           cli_text_size(s->memory_bytes).text, cli_text_size(s->budget_bytes).text);
    if (s->huge_pages != CKD_HUGE_PAGES_OFF) {
        printf(", %s in huge pages", cli_text_size(s->huge_bytes).text);
    }
    puts("");
    cli_table *t = cli_table_new(
        "RUN|>RANK|>PID|TRAINER|>MEMORY|>NEWEST|>COPIED|>LOCAL|>DURABLE|>SAVED|>FAILED|TROUBLE");
    for (size_t i = 0; i < s->count; i++) {
        const ckd_agent_session *x = &s->sessions[i];
        cli_table_cell(t, "%s", x->run);
        if (x->world) {
            cli_table_cell(t, "%" PRIu32 "/%" PRIu32, x->rank, x->world);
        } else {
            cli_table_cell(t, "-");
        }
        cli_table_cell(t, "%" PRId64, x->process);
        cli_table_cell(t, "%s", x->connected ? "connected" : "dead");
        cli_table_cell(t, "%s", cli_text_size(x->memory_bytes).text);
        step_cell(t, x->newest_step);
        step_cell(t, x->copied_step);
        step_cell(t, x->local_step);
        step_cell(t, x->durable_step);
        cli_table_cell(t, "%" PRIu64, x->saved);
        cli_table_cell(t, "%" PRIu64, x->failed);
        cli_table_cell(t, "%s", x->trouble[0] ? x->trouble : "-");
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && s->local[0]) {
        printf("\nlocal disk %s: snapshots take %s, %s were written; files in memory take %s", s->local,
               cli_text_size(s->local_bytes).text, cli_text_size(s->local_written_bytes).text,
               cli_text_size(s->own_bytes).text);
        printf(s->local_behind ? "; %" PRIu64 " changes behind\n" : "\n", s->local_behind);
        if (s->local_trouble[0]) {
            fputs("  ", stdout);
            cli_print_clean(stdout, s->local_trouble);
            puts("");
        }
    }
    return status == CKD_OK && s->replicate ? print_peers(s, err) : status;
}

/* ---- sentences ---- */

static bool is_newer(uint64_t step, uint64_t than) {
    return step != CKD_LATEST && (than == CKD_LATEST || step > than);
}

static void explain_place(const ckd_agent_session *x) {
    bool in_store = x->newest_step == x->durable_step, copied = x->copied_step == x->newest_step;
    uint64_t elsewhere = is_newer(x->copied_step, x->durable_step) ? x->copied_step : x->durable_step;
    if (in_store) {
        puts("  It is durable: if this node or the agent fails, it is in the store.");
    } else if (copied) {
        puts("  It is in the memory of other nodes: if this node fails now, it comes from there.");
    } else if (x->local_step == x->newest_step) {
        puts("  It is on the local disk: if the agent fails now, or the node restarts, it comes from there.");
    } else {
        puts("  It is nowhere else yet.");
    }
    if (in_store || copied) {
        return;
    }
    if (elsewhere == CKD_LATEST) {
        puts("  If this node is lost now, it is lost.");
    } else {
        printf("  If this node is lost now, step %" PRIu64 " is the newest, in the %s.\n", elsewhere,
               elsewhere == x->durable_step ? "store" : "memory of other nodes");
    }
    if (is_newer(x->local_step, x->durable_step) && x->local_step != x->newest_step) {
        printf("  Step %" PRIu64 " is on the local disk.\n", x->local_step);
    }
}

static void explain_session(const ckd_agent_session *x) {
    cli_print_clean(stdout, x->run);
    if (x->world) {
        printf(", rank %" PRIu32 " of %" PRIu32, x->rank, x->world);
    }
    if (x->newest_step == CKD_LATEST) {
        puts(": nothing complete is in memory yet. If the trainer is killed, it goes on from the store.");
        return;
    }
    if (!x->connected) {
        printf(": the trainer is dead. Its step %" PRIu64
               " is in memory, from where a restart on this node takes it.\n",
               x->newest_step);
    } else {
        printf(": step %" PRIu64 " is in memory. If the trainer is killed, nothing of it is lost.\n",
               x->newest_step);
    }
    explain_place(x);
    if (x->trouble[0]) {
        fputs("  The last save failed: ", stdout);
        cli_print_clean(stdout, x->trouble);
        putchar('\n');
    }
}

static void explain_peers(const ckd_agent_state *s) {
    printf("%" PRIu32 " of %" PRIu32 " other nodes %shave %s all states of this one.\n", s->replicated,
           s->replicate, s->parity ? "of the group " : "", s->parity ? "parity of" : "copies of");
    for (size_t i = 0; i < s->peer_count; i++) {
        const ckd_agent_peer *p = &s->peers[i];
        if (p->trouble[0]) {
            printf("  %s: ", p->name);
            cli_print_clean(stdout, p->trouble);
            putchar('\n');
        }
    }
}

static void explain_decisions(const ckd_agent_state *s) {
    if (s->decisions[0]) {
        puts("States found for restarts, and what became of them:");
        for (const char *line = s->decisions; *line;
             line += strcspn(line, "\n") + (line[strcspn(line, "\n")] != 0)) {
            printf("  %.*s\n", (int)strcspn(line, "\n"), line);
        }
    }
}

static void explain(const ckd_agent_state *s) {
    if (!s->count) {
        puts("No trainer uses the agent. Set CKPTDELTA_AGENT=auto in a trainer's environment.");
    }
    for (size_t i = 0; i < s->count; i++) {
        explain_session(&s->sessions[i]);
    }
    if (s->replicate) {
        explain_peers(s);
    }
    if (s->local_trouble[0]) {
        fputs("Copies do not reach the local disk: ", stdout);
        cli_print_clean(stdout, s->local_trouble);
        puts("");
    }
    explain_decisions(s);
}

ckd_status cli_agent_print(const ckd_agent_state *state, const cli_options *options, bool in_sentences,
                           ckd_error *err) {
    if (options->json) {
        return print_json(state, err);
    }
    if (cli_prints_text(options) && in_sentences) {
        explain(state);
        return CKD_OK;
    }
    return cli_prints_text(options) ? print_table(state, err) : CKD_OK;
}
