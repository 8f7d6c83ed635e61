// Questions about the GNU General Public License, version 3: one for each agent, and five more for
// the comparison.
#pragma once

#include <array>

namespace polykv::example {

inline constexpr std::array kQuestions = {
    "Who published this license?",
    "What is the name of this license?",
    "May I charge a price for each copy that I convey?",
    "What does the license mean by 'the Program'?",
    "What does 'to propagate' a work mean?",
    "What is the source code of a work?",
    "Does the license come with a warranty?",
    "What must I do when I convey object code?",
    "What is a 'User Product'?",
    "What happens when I violate this license?",
    "Do I need to accept the license to run a copy of the Program?",
    "What does the license say about patents?",
    "May I convey a covered work under the GNU Affero General Public License?",
    "Can later versions of the license impose new obligations on me?",
    "What are 'Additional permissions'?",
    "What is an 'aggregate'?",
    "How long must a written offer for the source be valid?",
    "What does 'Installation Information' mean?",
    "Who is 'you' in this license?",
    "How should I apply these terms to my new program?",
};

}  // namespace polykv::example
