/* The subcommands. argv[0] is "ckptdelta NAME", for messages. Each returns the exit status. */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

int cmd_save(int argc, char **argv);
int cmd_import(int argc, char **argv);
int cmd_load(int argc, char **argv);
int cmd_export(int argc, char **argv);
int cmd_follow(int argc, char **argv);
int cmd_publish(int argc, char **argv);
int cmd_list(int argc, char **argv);
int cmd_show(int argc, char **argv);
int cmd_diff(int argc, char **argv);
int cmd_report(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_scrub(int argc, char **argv);
int cmd_parity(int argc, char **argv);
int cmd_repair(int argc, char **argv);
int cmd_pin(int argc, char **argv);
int cmd_tag(int argc, char **argv);
int cmd_policy(int argc, char **argv);
int cmd_rename(int argc, char **argv);
int cmd_delete(int argc, char **argv);
int cmd_prune(int argc, char **argv);
int cmd_compact(int argc, char **argv);
int cmd_trash(int argc, char **argv);
int cmd_timeline(int argc, char **argv);
int cmd_copy(int argc, char **argv);
int cmd_push(int argc, char **argv);
int cmd_pull(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_attempts(int argc, char **argv);
int cmd_agent(int argc, char **argv);
int cmd_rebuild(int argc, char **argv);
int cmd_complete(int argc, char **argv);

#endif
