// A harness's command line: verbs, each with its arguments in words.

#pragma once

#include <cstdio>
#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>

struct verb {
    const char *                      usage;  // "one ROWS COLS"; an argument in brackets may be left out, and is nullptr
    std::function<int(char ** words)> run;    // takes the arguments, returns the exit status
};

// Run the verb that the command line names. 2, with the usage, if it names none or not with as many arguments.
static inline int run_verb(int argc, char ** argv, std::initializer_list<verb> verbs) {
    std::string usage;
    for (const verb & v : verbs) {
        std::istringstream words(v.usage);
        std::string        name, argument;
        int                least = 0, most = 0;
        words >> name;
        while (words >> argument) {
            ++most;
            least += argument[0] != '[';
        }
        if (argc > 1 && name == argv[1] && argc - 2 >= least && argc - 2 <= most) {
            return v.run(argv + 2);  // argv ends with nullptr
        }
        usage += (usage.empty() ? "" : " | ") + std::string(v.usage);
    }
    fprintf(stderr, "usage: %s %s\n", argv[0], usage.c_str());
    return 2;
}
